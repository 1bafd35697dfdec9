"""The list `features.prepare` of a spec: its operators checked, one after the other, and run by Spark.

prepared = Preparation.from_spec(spec)
prepared.columns                                # as if table.columns had them
prepared.spark(events, reader, train)           # DataFrame -> DataFrame

Where each operator treats each row alone, the Arrow engine applies them to the lake's files:

rows = row_preparation(spec)                    # None: some operator needs other rows, other tables, or Spark's SQL
rows.apply(table)                               # events as in the lake -> the rows that Preparation.spark makes of them

Operators join other tables, which `ExternalReader` reads: Delta, Parquet or CSV by path, or a named source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.config import NamedSource, OpSpec, Spec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.errors import UserError, nearest
from headrace.features.functions.timestamps import DAY_MICROS, HOUR_MICROS
from headrace.features.table_ops import TABLE_OPERATORS
from headrace.features.table_ops.base import (
    ExternalTable,
    SourceRead,
    SourceTable,
    SparkTableContext,
    TableOp,
    TableSchema,
    TrainRange,
    with_query,
    with_types,
)
from headrace.features.types import OpError, ValueType, build, declared
from headrace.stage.manifest import Input
from headrace.storage import Location, is_uri

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ExternalReader:
    """Reads external tables as they were pinned: Delta ones at their version; others as long as they are unchanged."""

    def __init__(self, ws: Workspace, pinned: Mapping[ExternalTable, str] | None = None) -> None:
        """`pinned`: versions of `pin`; other tables are read as they are."""
        self._ws, self._pinned = ws, dict(pinned or {})

    @staticmethod
    def pinned_by(ws: Workspace, tables: Sequence[ExternalTable], inputs: Sequence[Input]) -> ExternalReader:
        """Return a reader of the tables at the versions that a stage's inputs name.

        Raises:
            UserError: an input for one of the tables is missing.
        """
        pinned = {(i.kind, i.name): i.version for i in inputs}
        for table in tables:
            if (table.format, table.path) not in pinned:
                raise UserError(
                    f"{table.section}: the manifest of the features names no version of the {table.format} table "
                    f"{table.path}; run the features stage again"
                )
        return ExternalReader(ws, {t: pinned[t.format, t.path] for t in tables})

    def path(self, table: ExternalTable) -> Location:
        """Return the location of a table."""
        return _place(self._ws, table)

    def check_unchanged(self) -> None:
        """Call it again when the rows are computed: files are read late.

        Raises:
            UserError: a table without versions (Parquet, CSV) is no longer as it was pinned.
        """
        for table in self._pinned:
            self._check(table)

    def _check(self, table: ExternalTable) -> None:
        _see(self.path(table), table)
        pinned = self._pinned.get(table)
        if table.format != "delta" and pinned is not None and _version(self.path(table), table) != pinned:
            stage = table.section.partition(".")[0]
            raise UserError(
                f"{table.section}: the files of {self.path(table)} have changed since the {stage} stage looked at "
                f"them, and {table.format} keeps no older versions; run the {stage} stage again"
            )

    def spark(self, spark: SparkSession, table: ExternalTable) -> DataFrame:
        """Return the wanted columns in their types.

        Raises:
            UserError: the table or a column is not there, a column has another type, or files are not as pinned.
        """
        from headrace.features.functions.spark_expressions import col

        frame = self.load(spark, table)
        existing_types = dict(frame.dtypes)
        for name, type_ in table.columns.items():
            _check_type(table, name, type_, existing_types.get(name), list(existing_types))
        return frame.select(*[col(n).cast(str(t)).alias(n) for n, t in table.columns.items()])

    def load(self, spark: SparkSession, table: ExternalTable) -> DataFrame:
        """Return all columns in the types that the table has them in; of CSV as texts.

        Raises:
            UserError: the table is not there, or files are not as pinned.
        """
        path = self.path(table)
        self._check(table)
        reader = spark.read.format(table.format)
        if table.format == "delta":
            if table in self._pinned:
                reader = reader.option("versionAsOf", int(self._pinned[table]))
            return reader.load(str(path))
        if table.format == "csv":
            # A schema would go by position; texts are cast by name.
            return reader.option("header", True).option("mode", "FAILFAST").load(str(path))
        return reader.load(str(path))


def pin(ws: Workspace, tables: Sequence[ExternalTable]) -> tuple[Input, ...]:
    """Return the present version of each table: a Delta table's own, or a digest of file names, sizes and times.

    Raises:
        UserError: one of them is not there.
    """
    inputs = {}
    for table in tables:
        path = _place(ws, table)
        _see(path, table)
        inputs[table.format, table.path] = Input(kind=table.format, name=table.path, version=_version(path, table))
    return tuple(inputs.values())


def _place(ws: Workspace, table: ExternalTable) -> Location:
    location = ws.locate(table.path)
    return location.as_plain() if is_uri(table.path) else location


def _version(path: Location, table: ExternalTable) -> str:
    if table.format == "delta":
        from headrace.lake.delta.log import DeltaLog

        return str(DeltaLog(path).version)
    infos = path.infos() or {".": path.info()}
    in_order = sorted(infos.items(), key=lambda item: item[0].split("/"))
    # A store's times may be of seconds.
    listed = [(name, info.size, info.tag or info.modified_ns) for name, info in in_order]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def _see(path: Location, table: ExternalTable) -> None:
    exists = (path / "_delta_log").is_dir() if table.format == "delta" else path.exists()
    if not exists:
        raise UserError(f"{table.section}: there is no {table.format} table {path}")


def _check_type(table: ExternalTable, name: str, expected: ValueType, actual: str | None, names: Sequence[str]) -> None:
    place = f"{table.section}: table {table.path}"
    if actual is None:
        raise UserError(f"{place} has no column '{name}' (there are: {', '.join(names)})")
    if table.format == "csv":
        if expected.is_list:
            raise UserError(f"{place}: '{name}' is wanted as {expected}; CSV has no lists")
        return
    wider = {"int": {"smallint", "tinyint"}, "bigint": {"int", "smallint", "tinyint"}, "double": {"float"}}
    if actual != str(expected) and (expected.is_list or actual not in wider.get(expected.element, set())):
        raise UserError(f"{place}: column '{name}' is {actual}, but {expected} is wanted; change the spec or the table")


@dataclass(frozen=True)
class BoundTableOp:
    """An operator in its place: what arrives at it, and where the spec names it."""

    op: TableOp
    schema: TableSchema
    place: str


class Preparation:
    """Table operators in order, checked against the declared columns."""

    def __init__(
        self,
        ops: Sequence[OpSpec],
        columns: Sequence[TableColumn],
        label: str,
        time: str | None,
        knows_train: bool = False,
        sources: Mapping[str, SourceTable] | None = None,
        where: str = "features.prepare",
    ) -> None:
        """Check everything that can be known without data.

        Raises:
            UserError: an unknown operator or parameter, a column that an operator cannot take, with its place
                `features.prepare[i]`.
        """
        types = {c.name: declared(c) for c in columns}
        if time is not None and (types[time].is_list or types[time].element not in ("timestamp", "date")):
            time = None
        schema = TableSchema(types, label, time, knows_train, sources or {})
        steps: list[BoundTableOp] = []
        for i, spec in enumerate(ops):
            place = f"{where}[{i}]"
            op = build(TABLE_OPERATORS, spec.op, spec.params, place)
            past = [s.op.name for s in steps if s.op.keys_of()]
            if op.first_because and past:
                raise UserError(f"{place} ({op.name}): put it before {', '.join(past)}: {op.first_because}")
            try:
                self._check_label_delay(op, schema, max((s.op.label_wait() for s in steps), default=0))
                after = op.columns(schema)
                op.external(schema)
            except OpError as e:
                raise UserError(f"{place} ({op.name}): {e}") from None
            steps.append(BoundTableOp(op, schema, place))
            schema = with_types(schema, after)
        self.steps, self.end = tuple(steps), schema

    @staticmethod
    def _check_label_delay(op: TableOp, schema: TableSchema, wait: int) -> None:
        """Raise OpError where an operator takes earlier labels for known that may still become others."""
        if not wait or schema.label not in schema.types:
            return
        delay = op.label_delay(schema)
        if delay is not None and delay < wait:
            raise OpError(
                f"looks at '{schema.label}', which is known {wait / HOUR_MICROS:g} hours after an event (attribution's "
                f"within and wait): set delay_hours to at least that"
            )

    @staticmethod
    def from_spec(spec: Spec) -> Preparation:
        """Return the operators of a pipeline. Raises UserError, see `Preparation`."""
        f = spec.features
        sources = {name: source_table(s) for name, s in spec.sources.items()}
        time = spec.table.event_time
        return Preparation(f.prepare, spec.table.columns, f.label, time, f.split.by != "position", sources)

    @property
    def columns(self) -> tuple[TableColumn, ...]:
        """The declared columns as they are after all operators."""
        return tuple(TableColumn(name=n, type=str(t)) for n, t in self.end.types.items())

    def sources_of(self, label: str) -> frozenset[str]:
        """Return the columns of which an operator makes a label: a feature made of one would leak it."""
        return frozenset(c for s in self.steps if label not in s.schema.types for c in s.op.made_of(label, s.schema))

    @property
    def label_wait(self) -> int:
        """Microseconds after an event for which its label may still become another."""
        return max((s.op.label_wait() for s in self.steps), default=0)

    @property
    def label_source(self) -> str | None:
        """The named source that the label is made of, if it is."""
        return next((source for s in self.steps if (source := s.op.label_source()) is not None), None)

    @property
    def externals(self) -> tuple[ExternalTable, ...]:
        """The other tables that are read."""
        tables = (s.op.external(s.schema) for s in self.steps)
        return tuple(e for e in tables if e is not None)

    @property
    def sources(self) -> tuple[str, ...]:
        """The named sources that are read, in order."""
        reads = (s.op.source() for s in self.steps)
        return tuple(dict.fromkeys(read.name for read in reads if read is not None))

    @property
    def lookback_days(self) -> int:
        """Days before a row that the longest window looks at, rounded up."""
        return max((-(-s.op.lookback() // DAY_MICROS) for s in self.steps), default=0)

    def keys_behind(self, column: str) -> tuple[str, ...]:
        """Return the keys by whose past a column (of those at the end) was made; () for one of the row's own."""
        for i in range(len(self.steps) - 1, -1, -1):
            step = self.steps[i]
            if column in step.schema.types:
                continue
            if (old := step.op.former_name(column)) is not None:
                return self._some(self.steps[:i]).keys_behind(old)
            earlier = self._some(self.steps[:i])
            key_sets = [earlier.keys_behind(k) or (k,) for k in step.op.keys_of()]
            return tuple(dict.fromkeys(k for keys in key_sets for k in keys))
        return ()

    def split(self, serving: bool) -> tuple[Preparation, Preparation]:
        """Split into the leading operators that treat each row alone, and the rest; `serving`: without what is for
        training.
        """
        steps = [s for s in self.steps if s.op.serves or not serving]
        leading = next((i for i, s in enumerate(steps) if not s.op.rowwise), len(steps))
        return self._some(steps[:leading]), self._some(steps[leading:])

    def _some(self, steps: Sequence[BoundTableOp]) -> Preparation:
        part = object.__new__(Preparation)
        part.steps, part.end = tuple(steps), self.end
        return part

    def spark(
        self,
        frame: DataFrame,
        reader: ExternalReader,
        train: TrainRange | None = None,
        materialize: Callable[[DataFrame], DataFrame] | None = None,
        sources: Callable[[SourceRead], DataFrame] | None = None,
        seen_until: int | None = None,
    ) -> DataFrame:
        """Apply all operators to rows with `_source_file` and `_source_line`.

        The result has the column `__query` besides: null for events, `negative` for drawn rows; and, where a label is
        made of another source, LABEL_KNOWN.

        Args:
            frame: the events; a column `__query` marks rows that only ask.
            reader: of external tables.
            train: which rows are of the training range; for `negatives`.
            materialize: computes a frame once that is used several times.
            sources: reads named sources, see `SparkTableContext.source`.
            seen_until: see `SparkTableContext.seen_until`.
        """
        from headrace.features.table_ops.spark_windows import without_helpers

        frame = with_query(frame)
        spark = frame.sparkSession
        for step in self.steps:
            context = SparkTableContext(
                step.schema,
                lambda table: reader.spark(spark, table),
                sources or _no_sources,
                train,
                materialize or (lambda x: x),
                seen_until,
            )
            frame = step.op.spark(frame, context)
        return without_helpers(frame)


def source_table(source: NamedSource) -> SourceTable:
    """Return a named source as operators see it."""
    types = {c.name: declared(c) for c in source.table.columns}
    time = source.table.event_time
    return SourceTable(types, time if time is not None and types[time].element in ("timestamp", "date") else None)


def _no_sources(read: SourceRead) -> DataFrame:
    raise RuntimeError(f"nobody gave the rows of source '{read.name}'")


def prepared_columns(spec: Spec) -> tuple[TableColumn, ...]:
    """Return the columns that chains, label, split, carried columns and scoring may name.

    Raises:
        UserError: `features.prepare` has faults, or one of those names a column that is not there.
    """
    if not spec.features.prepare:
        return spec.table.columns
    columns = Preparation.from_spec(spec).columns
    names = [c.name for c in columns]
    for section, some in spec.named_columns().items():
        for column in some:
            if column not in names:
                raise UserError(
                    f"{section}: column '{column}' is neither declared in table.columns nor made by "
                    f"features.prepare{nearest(column, names)}"
                )
    return columns


def train_range(spec: Spec, first: str, after: str) -> TrainRange | None:
    """Return the training range for operators that draw from it: days [first, after); None where it is by position."""
    split = spec.features.split
    if split.by == "time":
        return TrainRange(midnight(first), midnight(after))
    return TrainRange(column=split.column) if split.column else None


def midnight(day: str, later: int = 0) -> int:
    """Return the first microsecond of a day (UTC), or of one `later` days on."""
    date_ = date.fromisoformat(day) + timedelta(days=later)
    return int(datetime(date_.year, date_.month, date_.day, tzinfo=UTC).timestamp()) * 1_000_000


#: Spark properties by which an expression means something else.
_MEANING = ("spark.sql.ansi.", "spark.sql.legacy.", "spark.sql.caseSensitive", "spark.sql.parser.")


@dataclass(frozen=True)
class RowPreparation:
    """Operators in their order; pickled into tasks."""

    steps: tuple[BoundTableOp, ...]

    def key(self) -> list[Any]:
        """JSON that says what the operators make."""
        return [{"op": s.op.name, "params": s.op.model_dump(mode="json")} for s in self.steps]

    def inputs(self, columns: Collection[str]) -> dict[str, ValueType]:
        """Return the lake's columns that `columns` ones, and which rows there are, are made of."""
        needed = set(columns)
        for step in reversed(self.steps):
            needed = step.op.reads(needed, step.schema)
        return {name: type_ for name, type_ in self.steps[0].schema.types.items() if name in needed}

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows of events whose columns have the declared types; texts may be dictionaries.

        Raises:
            UserError: an overflow of integers, or a division by zero.
        """
        for step in self.steps:
            rows = step.op.arrow_rows(step.schema)
            assert rows is not None
            table = rows(table)
        return table


def row_preparation(spec: Spec) -> RowPreparation | None:
    """Return the operators of a pipeline; None where it has none, or one that needs more than Arrow and a row."""
    if not spec.features.prepare or spark_alone(spec) is not None:
        return None
    return RowPreparation(Preparation.from_spec(spec).steps)


def spark_alone(spec: Spec) -> str | None:
    """Return the first operator for which rows must pass through Spark, as `features.prepare[1] (lambda)`; None: no
    operator.

    Raises:
        UserError: see `Preparation`.
    """
    changed = any(key.startswith(_MEANING) for key in spec.spark.properties)
    for step in Preparation.from_spec(spec).steps:
        if step.op.arrow_rows(step.schema) is None or (changed and step.op.name == "lambda"):
            return f"{step.place} ({step.op.name})"
    return None
