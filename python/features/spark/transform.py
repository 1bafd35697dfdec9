"""The Spark engine's transform: one select of expressions over left joins with vocabularies and keyed tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config.schema import Feature, Kind, quoted
from headrace.features.functions.spark_expressions import col, input_column
from headrace.features.learn.statistics import IDENTITY
from headrace.features.vocabulary.keyed_tables import KEY, KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow, table_file, vocabulary_file
from headrace.storage import Location

#: The smallest vocabularies and keyed tables are joined on broadcast copies, up to this many values together (some
#: 100 bytes each in every executor); the others as Spark chooses. See `Joins`.
BROADCAST_ROWS = 5_000_000
#: Bytes of text for which a side of long values counts as one more.
_VALUE_BYTES = 100
#: Spark fuses all broadcast joins of a select into one generated method, and the JIT leaves methods above 8,000
#: bytecodes interpreted: 26 joins ran at a quarter of the speed. A `coalesce` to more partitions than there are moves
#: no row and runs on GPUs too, but generated code ends at it.
_JOINS_A_METHOD = 4
_MORE_THAN_ANY = 1 << 20


@dataclass(frozen=True)
class Side:
    """The right side of a left join by a text."""

    frame: DataFrame
    key: str
    values: tuple[str, ...]
    rows: int
    #: Bytes of the keys.
    text_bytes: int

    @property
    def weight(self) -> int:
        """Rows, or as many of ordinary length as its keys take."""
        return max(self.rows, self.text_bytes // _VALUE_BYTES)


@dataclass
class Joins:
    """Left joins that expressions ask for while they are built, and that are put below them at the end."""

    frame: DataFrame
    #: The smallest sides are broadcast, of up to so many rows together (`Side.weight`): each executor holds them all.
    #: The others Spark joins as it finds best: by sorting both sides, or by a broadcast after all where the side's file
    #: is small.
    broadcast_rows: int
    _requested: list[tuple[Side, Column]] = field(default_factory=list)
    _first: int = 0
    _spent: int = 0

    def add(self, side: Side, key: Column) -> dict[str, Column]:
        """Return the side's values for a key, null where it lacks it."""
        i = self._first + len(self._requested)
        self._requested.append((side, key))
        return {name: F.col(f"__value{i}_{j}") for j, name in enumerate(side.values)}

    def apply(self) -> DataFrame:
        """Return the frame with the values of all joins asked for since the last time."""
        requested, first, frame = self._requested, self._first, self.frame
        if requested:
            frame = frame.select("*", *[key.alias(f"__key{first + i}") for i, (_, key) in enumerate(requested)])
        small = self._small([side for side, _ in requested])
        for i, (side, _) in enumerate(requested, first):
            values = [F.col(name).alias(f"__value{i}_{j}") for j, name in enumerate(side.values)]
            right = side.frame.select(F.col(side.key).alias(f"__key{i}"), *values)
            if id(side) in small:
                right = F.broadcast(right)
            frame = frame.join(right, f"__key{i}", "left")
            if (i - first + 1) % _JOINS_A_METHOD == 0 and i - first + 1 < len(requested):
                frame = frame.coalesce(_MORE_THAN_ANY)
        self.frame, self._requested, self._first = frame, [], first + len(requested)
        return frame

    def _small(self, sides: Sequence[Side]) -> set[int]:
        """Return the sides to broadcast, by `id`. A side that is joined several times is sent once."""
        small = set()
        for side in sorted({id(s): s for s in sides}.values(), key=lambda s: s.weight):
            if self._spent + side.weight <= self.broadcast_rows:
                self._spent += side.weight
                small.add(id(side))
        return small


def keyed_side(table: KeyedTable, frame: DataFrame, folder: Location | None, name: str) -> Side:
    """Return a keyed table as a frame: of its saved file where there is one (GPUs can scan it)."""
    spark = frame.sparkSession
    types = {"int64": "bigint", "double": "double", "string": "string"}
    ddl = ", ".join(f"{quoted(f.name)} {types[str(f.type)]}" for f in table.schema)
    if folder is not None:
        side_frame = spark.read.schema(ddl).parquet(table_file(folder, name).spark_path)
    else:
        side_frame = spark.createDataFrame(table.table, ddl)
    # Values travel under numbers: names of columns may hold dots.
    plain = side_frame.toDF(KEY, *[f"v{i}" for i in range(len(table.values))])
    return Side(plain, KEY, tuple(f"v{i}" for i in range(len(table.values))), len(table), table.text_bytes)


def vocabulary_side(vocabulary: Lookup, frame: DataFrame, folder: Location | None, name: str) -> Side:
    """Return a vocabulary (value string, code bigint) as a frame: of its saved file where there is one (GPUs can scan
    it).
    """
    spark, ddl = frame.sparkSession, "value string, code bigint"
    if folder is not None:
        side_frame = spark.read.schema(ddl).parquet(vocabulary_file(folder, name).spark_path)
    else:
        side_frame = spark.createDataFrame(vocabulary.table, ddl)
    return Side(side_frame, "value", ("code",), len(vocabulary), vocabulary.text_bytes)


def transform(
    fitted: FittedWorkflow,
    frame: DataFrame,
    keep: Mapping[str, str] | Sequence[str] = (),
    saved: Location | None = None,
    broadcast_rows: int = BROADCAST_ROWS,
    *,
    lists: bool = False,
) -> DataFrame:
    """Transform rows of the lake's table to physical columns: joins with vocabularies, then one select.

    Args:
        frame: has the input columns in their declared types, and IDENTITY where some rows are of the training range.
        keep: further columns, taken along unchanged at the end; a mapping renames them (name of the result -> of the
            frame).
        saved: the folder that the workflow was saved in: Spark reads vocabularies and tables from its files, which GPUs
            can scan. Without, and where it was not loaded from one, they go to Spark from this process.
        broadcast_rows: the smallest vocabularies and tables are broadcast, of up to so many rows together.
        lists: a list feature as one column of arrays as long as its values are, not padded to physical columns.
    """
    folder = saved or fitted.folder
    further_columns = dict(keep) if isinstance(keep, Mapping) else {name: name for name in keep}
    joins = _ChainJoins(Joins(frame, broadcast_rows))
    vocabularies: dict[str, Side] = {}

    def lookup(place: tuple[int, int], vocabulary: str, key: Column) -> Column:
        if vocabulary not in vocabularies:
            vocabularies[vocabulary] = vocabulary_side(fitted.vocabularies[vocabulary], frame, folder, vocabulary)
        return joins.add(place, vocabularies[vocabulary], key)["code"].cast("int")

    def table(place: tuple[int, int], name: str, key: Column) -> Mapping[str, Column]:
        full = f"{place[0]}.{place[1]}.{name}"
        keyed = fitted.tables[full]
        return dict(
            zip(keyed.values, joins.add(place, keyed_side(keyed, frame, folder, full), key).values(), strict=True)
        )

    identity = F.col(IDENTITY) if IDENTITY in frame.columns else None
    ends: dict[str, Column] = {}
    for i, (chain, states) in enumerate(zip(fitted.workflow.chains, fitted.states, strict=True)):
        columns = {name: input_column(name, fitted.workflow.input_type(name)) for name in chain.columns}
        for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
            columns = step.spark(columns, state, partial(lookup, (i, j)), partial(table, (i, j)), identity)
        ends |= columns

    selected = []
    for feature in fitted.features:
        x, stored = ends[feature.name], partial(_stored, feature)
        if not feature.is_list:
            selected.append(stored(x).alias(feature.name))
        elif lists:
            selected.append(F.transform(x, stored).alias(feature.name))
        else:
            zero = zero_of(feature)
            elements = [F.coalesce(stored(F.get(x, F.lit(i))), zero) for i in range(feature.length)]
            selected += [e.alias(column) for e, column in zip(elements, feature.physical, strict=True)]
    selected += [col(source).alias(name) for name, source in further_columns.items()]

    return joins.apply().select(*selected)


class _ChainJoins:
    """The joins that chains ask for, those of a step below those of the chain's later steps."""

    def __init__(self, joins: Joins) -> None:
        self._joins = joins
        #: (chain, step) of the joins that are not in the frame yet.
        self._waiting: set[tuple[int, int]] = set()

    def add(self, place: tuple[int, int], side: Side, key: Column) -> dict[str, Column]:
        """See Joins; the key may be made of what earlier steps of the chain have joined."""
        if any(chain == place[0] and step < place[1] for chain, step in self._waiting):
            self.apply()
        self._waiting.add(place)
        return self._joins.add(side, key)

    def apply(self) -> DataFrame:
        """See Joins."""
        self._waiting.clear()
        return self._joins.apply()


def zero_of(feature: Feature) -> Column:
    """Return 0 in the type that a feature is stored in."""
    return F.lit(0).cast({"int64": "bigint", "int32": "int"}.get(feature.dtype, "float"))


def _stored(feature: Feature, x: Column) -> Column:
    """Return a value of a feature in the type that it is stored in."""
    if feature.kind is Kind.CATEGORICAL:
        return x.cast("bigint" if feature.dynamic else "int")
    return _finite(x)


def _finite(x: Column) -> Column:
    """Return a number as float32; what is missing or not finite as float32 is 0."""
    single = x.cast("float")
    infinity = F.lit(float("inf")).cast("float")
    # NaN is above infinity in Spark's order, so it falls out too.
    return F.when((single < infinity) & (single > -infinity), single).otherwise(F.lit(0.0).cast("float"))
