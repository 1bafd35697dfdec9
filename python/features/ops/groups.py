"""Operators that learn statistics by key: value_count, join_groupby, target_encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from headrace.compute import pc
from headrace.features.functions.keys import check_keys, joint_key, spark_joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import F64, I64
from headrace.features.learn.statistics import (
    LABEL,
    Number,
    Partial,
    Partials,
    Statistic,
    counts,
    folds_of,
    numbers,
    spark_fold,
)
from headrace.features.ops.base import ArrowOpContext, EstimatorOp, FittedState, SparkOpContext
from headrace.features.ops.numbers import log1p
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class ValueCount(EstimatorOp):
    """Text, integers and booleans to `<column>_count`: how many rows of the training range have the value. bigint.

    With `log`, log(1 + count), double. 0 for a value that the training range lacks, null for null. A row of the
    training range counts itself. (Count encoding; NVTabular has it as JoinGroupby's count, and a ValueCount of lists'
    lengths.)
    """

    name: ClassVar[str] = "value_count"
    onnx: ClassVar[str] = "headrace.export.features.codes:value_count"
    by_value: ClassVar[bool] = True
    by_key: ClassVar[bool] = True

    #: log(1 + count) in place of the count.
    log: bool = False

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        check_keys(inputs)
        return {f"{name}_count": ValueType("double" if self.log else "bigint") for name in inputs}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {f"{name}_count": (name,) for name in inputs}

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(key=(name,)) for name in types}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        tables = {}
        for name in types:
            rows = counts(partials[name])
            values = log1p(rows.astype(np.float64)) if self.log else rows
            tables[name] = pa.table({"key": partials[name].column("key"), "count": values})
        return FittedState({}, tables)

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        out = {}
        for name, x in columns.items():
            known_count = context.table(name, x.cast("string"))["count"]
            none = F.lit(0).cast("double" if self.log else "bigint")
            out[f"{name}_count"] = F.when(x.isNotNull(), F.coalesce(known_count, none))
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, x in columns.items():
            table = context.table(name)
            known_counts = table.take("count", table.rows(x), 0)
            out[f"{name}_count"] = pc.if_else(x.is_valid(), known_counts, pa.scalar(None, known_counts.type))
        return out


Stat = Literal["count", "sum", "mean", "std", "min", "max"]
_TABLE = "groups"


class JoinGroupby(EstimatorOp):
    """Statistics by the values of the columns `by` together: `<by>_count` and, for each other column x,
    `<by>_x_<stat>`.

    Keys are text, integers and booleans; the other columns are numbers; out come bigint (count) and doubles, in place
    of all of the chain's columns. Statistics are over the rows of the training range with that key: count of rows; sum,
    mean, std (n - 1 below; 0 of one number), min, max of x where it is there. Null for a key that is null or that the
    training range lacks, its count 0. Sums are exact before they are rounded. NVTabular's JoinGroupby.
    """

    name: ClassVar[str] = "join_groupby"
    onnx: ClassVar[str] = "headrace.export.features.codes:join_groupby"
    by_key: ClassVar[bool] = True

    #: Columns of the chain that make the key; the others are the numbers.
    by: tuple[str, ...] = Field(min_length=1)
    stats: tuple[Stat, ...] = Field(default=("count",), min_length=1)

    @field_validator("by", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name in self.by:
            if name not in inputs:
                raise OpError(f"`by` names '{name}', which is no column here (there are: {', '.join(inputs)})")
        check_keys({name: inputs[name] for name in self.by})
        numbers = self._numbers(inputs)
        number_stats = [s for s in self.stats if s != "count"]
        if bool(numbers) != bool(number_stats):
            raise OpError(
                f"{', '.join(number_stats)} of which column? name one that is not in `by`"
                if number_stats
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
        stats = set(self.stats)
        sums, squares, minmax = bool(stats & {"sum", "mean", "std"}), "std" in stats, bool(stats & {"min", "max"})
        measured = tuple(Number(n, sum=sums, squares=squares, minmax=minmax) for n in self._numbers(types))
        return {_TABLE: Statistic(key=self.by, numbers=measured)}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        partial = partials[_TABLE]
        columns: dict[str, Any] = {"key": partial.column("key")}
        order = self._numbers(types)
        for name, stat, number in self._outputs(types):
            if number is None:
                columns[name] = counts(partial)
                continue
            i = order.index(number)
            n, sums = counts(partial, f"{i}.count"), numbers(partial, i, "sum")
            if stat in ("min", "max"):
                columns[name] = partial.column(f"{i}.{stat}")
            else:
                values = (
                    np.where(n > 0, exact_sums.floats(sums, len(n)), np.nan)
                    if stat == "sum"
                    else exact_sums.means(sums, n)
                    if stat == "mean"
                    else exact_sums.deviations(sums, numbers(partial, i, "squares"), n)
                )
                columns[name] = pa.array(values, from_pandas=True)
        return FittedState({}, {_TABLE: pa.table(columns)})

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        row = context.table(_TABLE, spark_joint_key([columns[name] for name in self.by]))
        return {
            name: F.coalesce(row[name], F.lit(0).cast("bigint")) if number is None else row[name]
            for name, _, number in self._outputs(context.types)
        }

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        table = context.table(_TABLE)
        rows = table.rows(joint_key([columns[name] for name in self.by]))
        return {
            name: table.take(name, rows, 0 if number is None else None)
            for name, _, number in self._outputs(context.types)
        }

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


#: Of the label by fold alone.
_PRIOR = "prior"


class TargetEncoding(EstimatorOp):
    """Text, integers and booleans to `<column>_te`, double: (sum of y + m * prior) / (n + m), m being `smoothing`.

    Over the n rows of the training range with the same value, `prior` being the label's mean over all of the training
    range. Of a row of the training range its own fold (of `folds`, by a hash of its identity) is left out of all three:
    of sum, n *and* prior, so that its own label is nowhere in its feature. (NVTabular's TargetEncoding, which is this
    formula, keeps it in the prior.) Other rows see all folds. A value that is null, or that the rows looked at lack,
    has the prior. Smoothing: Micci-Barreca, "A Preprocessing Scheme for High-Cardinality Categorical Attributes", 2001.

    This looks at the label of later rows of the training range; for a variant in order of time, see the table operator
    target_encoding_past.
    """

    name: ClassVar[str] = "target_encoding"
    onnx: ClassVar[str] = "headrace.export.features.codes:target_encoding"
    out_of_fold: ClassVar[bool] = True
    by_key: ClassVar[bool] = True

    folds: int = Field(default=5, ge=2, le=100)
    #: As many rows of the prior are added to each value's.
    smoothing: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    #: One encoding of all of the chain's columns together (`<a>_<b>_te`) in place of one of each.
    together: bool = False

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        check_keys(inputs)
        return {name: ValueType("double") for name in self.sources(inputs)}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        keys = [tuple(inputs)] if self.together else [(name,) for name in inputs]
        return {f"{'_'.join(key)}_te": key for key in keys}

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        label = (Number(LABEL, sum=True),)
        out = {name: Statistic(key=key, folds=self.folds, numbers=label) for name, key in self.sources(types).items()}
        return out | {_PRIOR: Statistic(folds=self.folds, numbers=label)}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        n, sums = self._without_folds(partials[_PRIOR], np.zeros(partials[_PRIOR].num_rows, np.int64), 1)
        y = [exact_sums.floats(s, 1) for s in sums]
        priors = [float(y[f][0] / n[f][0]) if n[f][0] else 0.0 for f in range(self.folds + 1)]
        tables = {}
        for name in self.sources(types):
            encoded = partials[name].column("key").combine_chunks().dictionary_encode()
            size = len(encoded.dictionary)
            n, sums = self._without_folds(partials[name], encoded.indices.to_numpy().astype(np.int64), size)
            values = {
                _column(f): self._smooth(exact_sums.floats(sums[f], size), n[f], priors[f]) for f in range(len(n))
            }
            tables[name] = pa.table({"key": encoded.dictionary, **values})
        return FittedState({name: {"priors": priors} for name in tables}, tables)

    def _without_folds(self, partial: Partial, keys: I64, size: int) -> tuple[list[I64], list[dict[int, I64]]]:
        """Return counts and sums (digits) by key: of all rows first, then without fold 0, 1, ... [folds + 1][size]."""
        fold = np.asarray(partial.column("fold").to_numpy(), np.int64)

        def by_key(x: I64) -> list[I64]:
            each = np.zeros((self.folds, size), np.int64)
            np.add.at(each, (fold, keys), x)
            total = each.sum(axis=0)
            return [total, *(total - part for part in each)]

        digits = {place: by_key(x) for place, x in numbers(partial, 0, "sum").items()}
        sums = [exact_sums.normalized({place: x[f] for place, x in digits.items()}) for f in range(self.folds + 1)]
        return by_key(counts(partial, "0.count")), sums

    def _smooth(self, y: F64, n: I64, prior: float) -> F64:
        weight = n + self.smoothing
        return np.where(weight > 0, (y + self.smoothing * prior) / np.where(weight > 0, weight, 1.0), prior)

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        out = {}
        for name, key in self.sources(context.types).items():
            row = context.table(name, spark_joint_key([columns[c] for c in key]))
            priors = context.state[name]["priors"]
            values = [F.coalesce(row[_column(f)], F.lit(float(prior))) for f, prior in enumerate(priors)]
            x = values[0]
            if context.identity is not None:
                fold = spark_fold(context.identity, self.folds)
                for f in range(self.folds):
                    x = F.when(fold == f, values[f + 1]).otherwise(x)
            out[name] = x
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, key in self.sources(context.types).items():
            table = context.table(name)
            rows = table.rows(joint_key([columns[c] for c in key]))
            column_index = self._column_index(context.identity, len(rows))
            x = np.empty(len(rows), np.float64)
            for f, prior in enumerate(context.state[name]["priors"]):
                positions = np.flatnonzero(column_index == f)
                x[positions] = table.take(_column(f), rows[positions], float(prior)).to_numpy(zero_copy_only=False)
            out[name] = pa.array(x)
        return out

    def _column_index(self, identity: pa.Array | None, n: int) -> Any:
        """0 for a row that is in no fold, else its fold and one."""
        if identity is None:
            return np.zeros(n, np.int64)
        fold = folds_of(identity.fill_null(0).to_numpy(zero_copy_only=False), self.folds)
        return np.where(identity.is_valid().to_numpy(zero_copy_only=False), fold + 1, 0)


def _column(fold: int) -> str:
    """Return a column of the keyed table: of all folds, or without fold 0, 1, ..."""
    return "all" if fold == 0 else f"without_{fold - 1}"
