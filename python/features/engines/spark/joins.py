"""Left joins with vocabularies and keyed tables, below the expressions that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.vocabulary.keyed_tables import KEY, KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.saved import table_file, vocabulary_file
from headrace.identifiers import quoted
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
        """The side's values for a key, null where it lacks it."""
        i = self._first + len(self._requested)
        self._requested.append((side, key))
        return {name: F.col(f"__value{i}_{j}") for j, name in enumerate(side.values)}

    def apply(self) -> DataFrame:
        """The frame with the values of all joins asked for since the last time."""
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
        """Which to broadcast, by `id`. A side that is joined several times is sent once."""
        found = set()
        for side in sorted({id(s): s for s in sides}.values(), key=lambda s: s.weight):
            if self._spent + side.weight <= self.broadcast_rows:
                self._spent += side.weight
                found.add(id(side))
        return found


def keyed_side(table: KeyedTable, frame: DataFrame, folder: Location | None, name: str) -> Side:
    """A keyed table as a frame: of its saved file where there is one (GPUs can scan it)."""
    spark = frame.sparkSession
    types = {"int64": "bigint", "double": "double", "string": "string"}
    ddl = ", ".join(f"{quoted(f.name)} {types[str(f.type)]}" for f in table.schema)
    if folder is not None:
        made = spark.read.schema(ddl).parquet(table_file(folder, name).spark_path)
    else:
        made = spark.createDataFrame(table.table, ddl)
    # Values travel under numbers: names of columns may hold dots.
    plain = made.toDF(KEY, *[f"v{i}" for i in range(len(table.values))])
    return Side(plain, KEY, tuple(f"v{i}" for i in range(len(table.values))), len(table), table.text_bytes)


def vocabulary_side(vocabulary: Lookup, frame: DataFrame, folder: Location | None, name: str) -> Side:
    """A vocabulary (value string, code bigint) as a frame: of its saved file where there is one (GPUs can scan it)."""
    spark, ddl = frame.sparkSession, "value string, code bigint"
    if folder is not None:
        made = spark.read.schema(ddl).parquet(vocabulary_file(folder, name).spark_path)
    else:
        made = spark.createDataFrame(vocabulary.table, ddl)
    return Side(made, "value", ("code",), len(vocabulary), vocabulary.text_bytes)
