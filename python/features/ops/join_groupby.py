"""join_groupby: statistics of the rows that have the same key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from headrace.features.functions.keys import check_keys, joint_key, spark_joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.statistics import Number, Partials, Statistic, counts, numbers
from headrace.features.ops.base import ArrowOpContext, FittedState, SparkOpContext
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

Stat = Literal["count", "sum", "mean", "std", "min", "max"]
_TABLE = "groups"


class JoinGroupby(EstimatorOp):
    """By the values of the columns `by` together: `<by>_count` and, for each other column x, `<by>_x_<stat>`.

    Keys are text, integers and booleans; the other columns are numbers; out come bigint (count) and doubles, in place
    of all of the chain's columns. Statistics are over the rows of the training range with that key: count of rows; sum,
    mean, std (n - 1 below; 0 of one number), min, max of x where it is there. Null for a key that is null or that the
    training range lacks, its count 0. Sums are exact before they are rounded. NVTabular's JoinGroupby.
    """

    name: ClassVar[str] = "join_groupby"
    by_key: ClassVar[bool] = True

    #: Columns of the chain that make the key; the others are the numbers.
    by: tuple[str, ...] = Field(min_length=1)
    stats: tuple[Stat, ...] = Field(default=("count",), min_length=1)

    @field_validator("by", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name in self.by:
            if name not in inputs:
                raise OpError(f"`by` names '{name}', which is no column here (there are: {', '.join(inputs)})")
        check_keys({name: inputs[name] for name in self.by})
        numbers = self._numbers(inputs)
        wanted = [s for s in self.stats if s != "count"]
        if bool(numbers) != bool(wanted):
            raise OpError(
                f"{', '.join(wanted)} of which column? name one that is not in `by`"
                if wanted
                else f"what of column '{numbers[0]}'? `stats` names nothing but count"
            )
        for name in numbers:
            if inputs[name].is_list or not inputs[name].is_number:
                raise OpError(f"column '{name}': takes numbers, not {inputs[name]}")
        return {name: ValueType("bigint" if stat == "count" else "double") for name, stat, _ in self._outputs(inputs)}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        # What is looked up depends on the key alone.
        return {name: self.by for name, _, _ in self._outputs(inputs)}

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        wanted = set(self.stats)
        sums, squares, minmax = bool(wanted & {"sum", "mean", "std"}), "std" in wanted, bool(wanted & {"min", "max"})
        measured = tuple(Number(n, sum=sums, squares=squares, minmax=minmax) for n in self._numbers(types))
        return {_TABLE: Statistic(key=self.by, numbers=measured)}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        partial = partials[_TABLE]
        columns: dict[str, Any] = {"key": partial.column("key")}
        order = self._numbers(types)
        for name, stat, of in self._outputs(types):
            if of is None:
                columns[name] = counts(partial)
                continue
            i = order.index(of)
            n, sums = counts(partial, f"{i}.count"), numbers(partial, i, "sum")
            if stat in ("min", "max"):
                columns[name] = partial.column(f"{i}.{stat}")
            else:
                found = (
                    np.where(n > 0, exact_sums.floats(sums, len(n)), np.nan)
                    if stat == "sum"
                    else exact_sums.means(sums, n)
                    if stat == "mean"
                    else exact_sums.deviations(sums, numbers(partial, i, "squares"), n)
                )
                columns[name] = pa.array(found, from_pandas=True)
        return FittedState({}, {_TABLE: pa.table(columns)})

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        found = context.table(_TABLE, spark_joint_key([columns[name] for name in self.by]))
        return {
            name: F.coalesce(found[name], F.lit(0).cast("bigint")) if of is None else found[name]
            for name, _, of in self._outputs(context.types)
        }

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        table = context.table(_TABLE)
        rows = table.rows(joint_key([columns[name] for name in self.by]))
        return {name: table.take(name, rows, 0 if of is None else None) for name, _, of in self._outputs(context.types)}

    def _numbers(self, inputs: Mapping[str, ValueType]) -> list[str]:
        return [name for name in inputs if name not in self.by]

    def _outputs(self, inputs: Mapping[str, ValueType]) -> list[tuple[str, Stat, str | None]]:
        """(name, statistic, number) of each column that comes out."""
        key = "_".join(self.by)
        out: list[tuple[str, Stat, str | None]] = []
        for stat in dict.fromkeys(self.stats):
            if stat == "count":
                out.append((f"{key}_count", stat, None))
            else:
                out += [(f"{key}_{number}_{stat}", stat, number) for number in self._numbers(inputs)]
        return out
