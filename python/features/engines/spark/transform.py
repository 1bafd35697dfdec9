"""The Spark side of a fitted workflow: one select of expressions over left joins with the vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.learn.statistics import IDENTITY
from headrace.features.types import ValueType
from headrace.features.vocabulary.keyed_table import KEY, KeyedTable
from headrace.schema import Feature, Kind

if TYPE_CHECKING:
    from headrace.features.workflow.workflow import FittedWorkflow

#: Spark fuses all broadcast joins of a select into one generated method, and the JIT leaves methods above 8,000
#: bytecodes interpreted: 26 joins ran at a quarter of the speed. A `coalesce` to more partitions than there are moves
#: no row and runs on GPUs too, but generated code ends at it.
_JOINS_A_METHOD = 4
_MORE_THAN_ANY = 1 << 20


def col(name: str) -> Column:
    """A column by its exact name, dots and all."""
    return F.col(f"`{name.replace('`', '``')}`")


def enter(name: str, given: ValueType) -> Column:
    """An input column as operators see it: NaN is null, a null list is empty."""
    x = col(name)
    real = given.element in ("float", "double")
    if given.is_list:
        x = F.coalesce(x, F.array().cast(f"array<{given.element}>"))
        return F.transform(x, _nan_to_null) if real else x
    return _nan_to_null(x) if real else x


def is_missing(name: str, given: ValueType) -> Column:
    """Boolean: no value (null, NaN, an empty list)."""
    x = enter(name, given)
    return F.size(x) == 0 if given.is_list else x.isNull()


def padded(feature: Feature) -> list[Column]:
    """A stored feature's values in the columns of a batch, 0 where a list has ended."""
    if not feature.is_list:
        return [col(feature.name)]
    zero = zero_of(feature)
    return [F.coalesce(F.get(col(feature.name), F.lit(i)), zero) for i in range(feature.length)]


def zero_of(feature: Feature) -> Column:
    """0 in the type that a feature is stored in."""
    return F.lit(0).cast({"int64": "bigint", "int32": "int"}.get(feature.dtype, "float"))


def stored(feature: Feature, values: Sequence[Column]) -> Column:
    """The reverse of `padded`: a list without the zeros at its end."""
    if not feature.is_list:
        return values[0]
    # The place of the last value that is not 0: the first in an order from the end.
    ends = [F.when(x != zero_of(feature), F.lit(i)) for i, x in reversed(list(enumerate(values, 1)))]
    return F.slice(F.array(*values), F.lit(1), F.coalesce(*ends, F.lit(0)))


def transform_frame(
    fitted: FittedWorkflow, frame: DataFrame, keep: Mapping[str, str], folder: Path | None, broadcast_rows: int
) -> DataFrame:
    """See `FittedWorkflow.transform`."""
    joins = Joins(frame, broadcast_rows)
    vocabularies: dict[str, Side] = {}

    def lookup(vocabulary: str, key: Column) -> Column:
        if vocabulary not in vocabularies:
            side = _vocabulary(fitted, frame, vocabulary, folder)
            vocabularies[vocabulary] = Side(side, "value", ("code",), len(fitted.vocabularies[vocabulary]))
        return joins.add(vocabularies[vocabulary], key)["code"].cast("int")

    def table(scope: str, name: str, key: Column) -> Mapping[str, Column]:
        keyed = fitted.tables[f"{scope}.{name}"]
        return dict(
            zip(keyed.values, joins.add(keyed_side(keyed, frame, folder, f"{scope}.{name}"), key).values(), strict=True)
        )

    identity = F.col(IDENTITY) if IDENTITY in frame.columns else None
    ends: dict[str, Column] = {}
    for i, (chain, states) in enumerate(zip(fitted.workflow.chains, fitted.states, strict=True)):
        columns = {name: enter(name, fitted.workflow.input_type(name)) for name in chain.columns}
        for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
            columns = step.spark(columns, state, lookup, partial(table, f"{i}.{j}"), identity)
        ends |= columns

    selected = []
    for feature in fitted.features:
        x = ends[feature.name]
        for i, column in enumerate(feature.physical):
            value = F.get(x, F.lit(i)) if feature.is_list else x
            code = value.cast("bigint" if feature.dynamic else "int")
            selected.append((code if feature.kind is Kind.CATEGORICAL else _finite(value)).alias(column))
    selected += [col(source).alias(name) for name, source in keep.items()]

    return joins.apply().select(*selected)


@dataclass(frozen=True)
class Side:
    """The right side of a left join by a text."""

    frame: DataFrame
    key: str
    values: tuple[str, ...]
    rows: int


@dataclass
class Joins:
    """Left joins that expressions ask for while they are built, and that are put below them at the end."""

    frame: DataFrame
    #: The smallest sides are broadcast, of up to so many rows together: each executor holds them all. The others Spark
    #: joins as it finds best: by sorting both sides, or by a broadcast after all where the side's file is small.
    broadcast_rows: int
    _asked: list[tuple[Side, Column]] = field(default_factory=list)
    _first: int = 0
    _spent: int = 0

    def add(self, side: Side, key: Column) -> dict[str, Column]:
        """The side's values for a key, null where it lacks it."""
        i = self._first + len(self._asked)
        self._asked.append((side, key))
        return {name: F.col(f"__value{i}_{j}") for j, name in enumerate(side.values)}

    def apply(self) -> DataFrame:
        """The frame with the values of all joins asked for since the last time."""
        asked, first, frame = self._asked, self._first, self.frame
        if asked:
            frame = frame.select("*", *[key.alias(f"__key{first + i}") for i, (_, key) in enumerate(asked)])
        small = self._small([side for side, _ in asked])
        for i, (side, _) in enumerate(asked, first):
            values = [F.col(name).alias(f"__value{i}_{j}") for j, name in enumerate(side.values)]
            right = side.frame.select(F.col(side.key).alias(f"__key{i}"), *values)
            if id(side) in small:
                right = F.broadcast(right)
            frame = frame.join(right, f"__key{i}", "left")
            if (i - first + 1) % _JOINS_A_METHOD == 0 and i - first + 1 < len(asked):
                frame = frame.coalesce(_MORE_THAN_ANY)
        self.frame, self._asked, self._first = frame, [], first + len(asked)
        return frame

    def _small(self, sides: Sequence[Side]) -> set[int]:
        """Which to broadcast, by `id`. A side that is joined several times is sent once."""
        found = set()
        for side in sorted({id(s): s for s in sides}.values(), key=lambda s: s.rows):
            if self._spent + side.rows <= self.broadcast_rows:
                self._spent += side.rows
                found.add(id(side))
        return found


def keyed_side(table: KeyedTable, frame: DataFrame, folder: Path | None, name: str) -> Side:
    """A keyed table as a frame: of its saved file where there is one (GPUs can scan it)."""
    from headrace.features.workflow.workflow import table_file

    spark = frame.sparkSession
    types = {"int64": "bigint", "double": "double", "string": "string"}
    ddl = ", ".join(f"`{f.name.replace('`', '``')}` {types[str(f.type)]}" for f in table.table.schema)
    if folder is not None:
        made = spark.read.schema(ddl).parquet(str(table_file(folder, name)))
    else:
        made = spark.createDataFrame(table.table, ddl)
    # Values travel under numbers: names of columns may hold dots.
    plain = made.toDF(KEY, *[f"v{i}" for i in range(len(table.values))])
    return Side(plain, KEY, tuple(f"v{i}" for i in range(len(table.values))), len(table))


def _vocabulary(fitted: FittedWorkflow, frame: DataFrame, name: str, folder: Path | None) -> DataFrame:
    """A vocabulary as a frame (value string, code bigint): of its saved file where there is one (GPUs can scan it)."""
    from headrace.features.workflow.workflow import vocabulary_file

    spark = frame.sparkSession
    if folder is not None:
        return spark.read.schema("value string, code bigint").parquet(str(vocabulary_file(folder, name)))
    return spark.createDataFrame(fitted.vocabularies[name].table, "value string, code bigint")


def _nan_to_null(x: Column) -> Column:
    return F.when(~F.isnan(x), x)


def _finite(x: Column) -> Column:
    """A number as float32; what is missing or not finite as float32 is 0."""
    single = x.cast("float")
    infinity = F.lit(float("inf")).cast("float")
    # NaN is above infinity in Spark's order, so it falls out too.
    return F.when((single < infinity) & (single > -infinity), single).otherwise(F.lit(0.0).cast("float"))
