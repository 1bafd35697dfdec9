"""Table operators: parameters, the columns that they leave, and a Spark implementation that makes the rows.

Row operators (headrace.features.ops) see one row; table operators see all events: they filter and join, and give each
row what was before it. They run before the chains, which then use their columns as if the table had them. In a spec
they are the list `features.prepare`, applied in order.

To add one, write a class in the module of its family in headrace.features.table_ops and name it in that package's
registry; and, for the tests, the same over Arrow tables in tests/arrow_table_ops. Where each row is treated alone the
Arrow body is the operator's own (`arrow_rows`): the Arrow engine then applies it to the lake's files as it decodes
them.

Time. *Before* a row means: events at a strictly earlier instant (microsecond; a day where `table.event_time` is a
date). Neither the row itself nor another one at the same instant is before it, so the order of rows within an instant
never matters, and no row that is added, changed or removed later can change what an earlier row got.

Query rows. A row whose column `__query` is not null is no event: it gets what was before it and is itself before no
other row (the spine of a point-in-time join). Drawn negatives are query rows, and so are the rows at the end of a day
that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from headrace.compute import pc
from headrace.errors import nearest
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Where a row comes from: together its identity.
FILE, LINE = "_source_file", "_source_line"
#: Why a row is a query row; null for events.
QUERY = "__query"
#: False where the row's label may still become another (headrace.features.table_ops.attribution).
LABEL_KNOWN = "__label_known"
#: What a table of events has besides its declared columns.
META: Mapping[str, ValueType] = {FILE: ValueType("string"), LINE: ValueType("bigint"), QUERY: ValueType("string")}

#: Types that a key may have. Floating-point numbers are no keys: NaN, -0.0.
TABLE_KEY_TYPES = ("string", "int", "bigint", "boolean", "date")


@dataclass(frozen=True)
class SourceTable:
    """A named source of the pipeline, as operators that say `from:` see it."""

    types: Mapping[str, ValueType]
    #: The column of the time of its events (timestamp or date); None where it has none.
    time: str | None = None


@dataclass(frozen=True)
class SourceRead:
    """The rows of a named source that an operator, or a score, reads.

    events: what happened, by its time; of a snapshot source the newest snapshot. Without a lookback of its own from
        `features.history_days` before the training range on, where that is set.
    all_events: the same, however long ago.
    versions: what was valid from its time on; of a source without a time, from the end of the landing day.
    table: the newest snapshot, or all landing days.
    newest: the newest snapshot, or the newest landing day.
    """

    name: str
    use: Literal["events", "all_events", "versions", "table", "newest"]
    #: Microseconds before a row that are enough; None: all there are.
    lookback: int | None = None


@dataclass(frozen=True)
class TableSchema:
    """The table that arrives at an operator, as far as it is known before any data is read."""

    types: Mapping[str, ValueType]
    label: str
    #: The column of the event's time: timestamp or date; None where the table has none.
    time: str | None = None
    #: Whether `prepare` may know which rows are of the training range.
    knows_train: bool = False
    sources: Mapping[str, SourceTable] = field(default_factory=dict)

    def of_source(self, name: str) -> TableSchema:
        """Return a named source as a table of its own, without a label. Raises OpError where there is none of that
        name.
        """
        if name not in self.sources:
            known = f"; sources has: {', '.join(self.sources)}" if self.sources else "; the pipeline has no `sources`"
            raise OpError(f"from: there is no source '{name}'{nearest(name, self.sources)}{known}")
        source = self.sources[name]
        return TableSchema(source.types, "", source.time)

    def type_of(self, column: str) -> ValueType:
        """Return the type of a column. Raises OpError where there is none of that name."""
        if column not in self.types:
            raise OpError(f"column '{column}' is not there (there are: {', '.join(self.types)})")
        return self.types[column]

    def key(self, column: str, also: tuple[str, ...] = TABLE_KEY_TYPES) -> ValueType:
        """Return the type of a key. Raises OpError for what can be none."""
        type_ = self.type_of(column)
        if type_.is_list or type_.element not in also:
            raise OpError(f"key '{column}' is {type_}; a key is one of {', '.join(also)}")
        return type_

    def not_label(self, columns: tuple[str, ...] | list[str], result: str) -> None:
        """Raise OpError where the row's own label would become part of `result`."""
        if self.label in columns:
            raise OpError(f"'{self.label}' is the label, and the row's own would be in {result}: that leaks it")

    def needs_time(self) -> str:
        """Return the event's time. Raises OpError where the table has none."""
        if self.time is None:
            raise OpError("needs the time of events: set table.event_time")
        return self.time

    def adding(self, new: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Return all columns with some more. Raises OpError where a name is taken, be it in another case, or is
        reserved.
        """
        existing = {name.lower(): name for name in self.types}
        for name in new:
            same = existing.setdefault(name.lower(), name)
            if same != name or name in self.types:
                raise OpError(
                    f"adds column '{name}', which is already there{_case(name, same)}; give the operator another "
                    f"`prefix` or `suffix`"
                )
            if reserved(name):
                raise OpError(f"adds column '{name}', a reserved name (`ds` and names that begin with `_`)")
        return {**self.types, **new}


@dataclass(frozen=True)
class ExternalTable:
    """Another table that an operator reads."""

    path: str
    format: Literal["delta", "parquet", "csv"]
    #: Column -> type, as the operator wants them.
    columns: Mapping[str, ValueType] = field(hash=False)
    #: The section of the spec that names it, for messages.
    section: str = "features.prepare"


@dataclass(frozen=True)
class TrainRange:
    """The training range: rows with a time in [start, end), microseconds since 1970; or with `column` = 'train'."""

    start: int = 0
    end: int = 0
    column: str | None = None


@dataclass(frozen=True)
class SparkTableContext:
    """Inputs of the Spark implementation besides the rows."""

    schema: TableSchema
    read: Callable[[ExternalTable], DataFrame]
    #: The rows of a named source: its columns, FILE, LINE, and EVENT_MICROS (spark_windows), the microsecond since 1970
    #: from which on it can be known.
    source: Callable[[SourceRead], DataFrame]
    train: TrainRange | None = None
    #: Compute a frame once where it is used several times; the stage writes it to disk.
    materialize: Callable[[DataFrame], DataFrame] = field(default=lambda frame: frame)
    #: The microsecond up to which all that happened has landed; None: up to the newest row that there is.
    seen_until: int | None = None


class TableOp(BaseModel):
    """An operator over a whole table. Its fields are its parameters; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    #: Whether what a row becomes depends on that row (and external tables) alone.
    rowwise: ClassVar[bool] = False
    #: Whether rows that are scored pass through it too; drawing negatives is for training.
    serves: ClassVar[bool] = True
    #: Why it comes before operators that look at the past of keys; empty: it need not.
    first_because: ClassVar[str] = ""

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        """Return all columns afterwards, with their types. Raises OpError for what it cannot take."""
        raise NotImplementedError

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        """Return rows with META: expressions, joins and windows; no Python function."""
        raise NotImplementedError

    def arrow_rows(self, schema: TableSchema) -> Callable[[pa.Table], pa.Table] | None:
        """Return the function that makes the rows of `spark`, to the bit, from events in an Arrow table.

        None: only Spark does it. Texts may be dictionaries; NaN and nulls of lists are as in the lake.
        """
        return None

    def reads(self, needed: Collection[str], schema: TableSchema) -> set[str]:
        """Return the columns that `needed` ones, and which rows there are, are made of; a superset of them."""
        return set(schema.types)

    def external(self, schema: TableSchema) -> ExternalTable | None:
        """Return the other table that it reads, if it does."""
        return None

    def source(self) -> SourceRead | None:
        """Return the named source that it reads, or None."""
        return None

    def lookback(self) -> int:
        """Microseconds before a row that it must see of the events, where there is such a bound; else 0."""
        return 0

    def label_wait(self) -> int:
        """Microseconds after a row for which the label that it adds may still become another."""
        return 0

    def label_source(self) -> str | None:
        """Return the named source that the label is made of, if it makes one of a source."""
        return None

    def label_delay(self, schema: TableSchema) -> int | None:
        """Microseconds after which it takes an earlier event's label for known; None: it looks at no labels."""
        return None

    def keys_of(self) -> tuple[str, ...]:
        """Return the keys by which it groups events to look at those before a row."""
        return ()

    def former_name(self, column: str) -> str | None:
        """Return the name that a column had before, where it gives it another one; else None."""
        return None

    def made_of(self, column: str, schema: TableSchema) -> frozenset[str]:
        """Return the columns of the same row from which an added column is computed, as far as they are known."""
        return frozenset()


def with_query(frame: DataFrame) -> DataFrame:
    """Return the rows with the column `__query`, null where it was not there: all are events."""
    from pyspark.sql import functions as F

    return frame if QUERY in frame.columns else frame.withColumn(QUERY, F.lit(None).cast("string"))


def filter_events(rows: pa.Table, condition: pa.Array) -> pa.Table:
    """Return the rows of an Arrow table for which a condition without nulls is true, and all query rows."""
    if QUERY in rows.schema.names:
        condition = pc.or_(condition, pc.is_valid(rows.column(QUERY)))
    return rows.filter(condition)


def scalar(schema: TableSchema, column: str, elements: tuple[str, ...], subject: str) -> ValueType:
    """Return the type of a column that must be a single value of one of `elements`. Raises OpError."""
    type_ = schema.type_of(column)
    if type_.is_list or type_.element not in elements:
        raise OpError(f"{subject}: column '{column}' is {type_}, not one of {', '.join(elements)}")
    return type_


NUMBERS = ("int", "bigint", "float", "double", "decimal", "boolean")


def with_types(schema: TableSchema, types: Mapping[str, ValueType]) -> TableSchema:
    """Return the same table with other columns."""
    return replace(schema, types=dict(types))


def reserved(name: str) -> bool:
    """Return whether a name is reserved in the table of events."""
    return name.startswith("_") or name.lower() == "ds"


def _case(name: str, same: str) -> str:
    return "" if name == same else f" as '{same}' (Spark's names have no case)"


def refuse(condition: bool, message: str) -> None:
    """Raise OpError where a condition holds."""
    if condition:
        raise OpError(message)
