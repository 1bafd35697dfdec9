"""Other tables that operators join: Delta, Parquet or CSV by path, or a named source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.section import LocationText
from headrace.errors import UserError, nearest
from headrace.features.table_ops.base import ExternalTable, SparkTableContext, TableOp, TableSchema
from headrace.features.table_ops.earlier_events import same_names
from headrace.features.types import OpError, ValueType, declared
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Input
from headrace.schema import ColumnType, TableColumn
from headrace.storage import Location, is_uri
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ReadsOtherTable(TableOp):
    """The parameters that operators with another table share: one at a path, or a named source of the pipeline."""

    #: A folder (or file): a path, relative to the workspace's home unless absolute, or a URI (`s3://BUCKET/FOLDER`).
    path: LocationText | None = None
    format: Literal["delta", "parquet", "csv"] = "delta"
    #: A named source, in place of `path`.
    from_: str | None = Field(default=None, alias="from")
    #: Names of the key in both tables, or column of the events -> column of the other table.
    keys: Mapping[str, str] = Field(min_length=1)
    #: The columns to take: name in the other table -> type; of a source a list of names, whose types are declared.
    add: Mapping[str, ColumnType | None] = Field(min_length=1)
    #: Put before the names of the columns that are added.
    prefix: str = ""

    @field_validator("keys", mode="before")
    @classmethod
    def _same_names(cls, value: Any) -> Any:
        return same_names(value)

    @field_validator("add", mode="before")
    @classmethod
    def _declared_types(cls, value: Any) -> Any:
        return dict.fromkeys(value) if isinstance(value, (list, tuple)) else value

    @model_validator(mode="after")
    def _one_table(self) -> ReadsOtherTable:
        if (self.path is None) == (self.from_ is None):
            raise ValueError("give `path`, or `from`: a named source")
        if self.from_ is not None and "format" in self.model_fields_set:
            raise ValueError("`format` goes with `path`")
        if self.path is not None and (untyped := [n for n, t in self.add.items() if t is None]):
            raise ValueError(f"add: say the type of '{untyped[0]}', as in {{{untyped[0]}: double}}")
        return self

    @property
    def what(self) -> str:
        """The other table for a message."""
        return f"table {self.path}" if self.from_ is None else f"source '{self.from_}'"

    def wanted(self, schema: TableSchema, more: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The columns of the other table that are read: keys, `add`, and `more`.

        Raises:
            OpError: the source has one as another type, or not; one is wanted as two types.
        """
        source = None if self.from_ is None else schema.of_source(self.from_).types
        types: dict[str, ValueType] = {}
        wanted = [(theirs, schema.key(ours)) for ours, theirs in self.keys.items()]
        wanted += [*more.items(), *((n, self._type_of(n, schema)) for n in self.add)]
        for name, type_ in wanted:
            if types.setdefault(name, type_) != type_:
                raise OpError(f"column '{name}' of {self.what} is wanted as {types[name]} and as {type_}")
            if source is not None and source.get(name) != type_:
                found = f"is declared {source[name]}" if name in source else f"is not declared{nearest(name, source)}"
                raise OpError(f"column '{name}' of {self.what} {found}, but {type_} is wanted")
        return types

    def added(self, schema: TableSchema) -> dict[str, ValueType]:
        """The columns that the operator adds."""
        return {f"{self.prefix}{n}": self._type_of(n, schema) for n in self.add}

    def external_table(self, schema: TableSchema, more: Mapping[str, ValueType]) -> ExternalTable | None:
        """The table at the path; None where the other table is a source. Raises OpError, see `wanted`."""
        wanted = self.wanted(schema, more)
        return None if self.path is None else ExternalTable(self.path, self.format, wanted)

    def read(self, context: SparkTableContext, more: Mapping[str, ValueType]) -> DataFrame:
        """The other table's rows, with at least the columns of `wanted`."""
        read, table = self.source(), self.external_table(context.schema, more)
        if table is not None:
            return context.read(table)
        assert read is not None
        return context.source(read)

    def _type_of(self, name: str, schema: TableSchema) -> ValueType:
        given = self.add[name]
        if given is not None:
            return declared(TableColumn(name=name, type=given))
        assert self.from_ is not None
        return schema.of_source(self.from_).type_of(name)


class ExternalReader:
    """Reads external tables as they were pinned: Delta ones at their version; others as long as they are unchanged."""

    def __init__(self, ws: Workspace, pinned: Mapping[ExternalTable, str] | None = None) -> None:
        """`pinned`: versions of `pin`; other tables are read as they are."""
        self._ws, self._pinned = ws, dict(pinned or {})

    @staticmethod
    def of(ws: Workspace, tables: Sequence[ExternalTable], inputs: Sequence[Input]) -> ExternalReader:
        """Reads the tables at the versions that a stage's inputs name.

        Raises:
            UserError: an input for one of the tables is missing.
        """
        pinned = {(i.kind, i.name): i.version for i in inputs}
        for table in tables:
            if (table.format, table.path) not in pinned:
                raise UserError(
                    f"{table.where}: the manifest of the features names no version of the {table.format} table "
                    f"{table.path}; run the features stage again"
                )
        return ExternalReader(ws, {t: pinned[t.format, t.path] for t in tables})

    def path(self, table: ExternalTable) -> Location:
        """Where it is."""
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
            stage = table.where.partition(".")[0]
            raise UserError(
                f"{table.where}: the files of {self.path(table)} have changed since the {stage} stage looked at "
                f"them, and {table.format} keeps no older versions; run the {stage} stage again"
            )

    def spark(self, spark: SparkSession, table: ExternalTable) -> DataFrame:
        """The wanted columns in their types.

        Raises:
            UserError: the table or a column is not there, a column has another type, or files are not as pinned.
        """
        from headrace.features.functions.spark_expressions import col

        frame = self.load(spark, table)
        there = dict(frame.dtypes)
        for name, type_ in table.columns.items():
            _check_type(table, name, type_, there.get(name), list(there))
        return frame.select(*[col(n).cast(str(t)).alias(n) for n, t in table.columns.items()])

    def load(self, spark: SparkSession, table: ExternalTable) -> DataFrame:
        """All columns in the types that the table has them in; of CSV as texts.

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
    """What identifies the tables as they are now: a Delta table's version; of others a digest of names, sizes, times.

    Raises:
        UserError: one of them is not there.
    """
    found = {}
    for table in tables:
        path = _place(ws, table)
        _see(path, table)
        found[table.format, table.path] = Input(kind=table.format, name=table.path, version=_version(path, table))
    return tuple(found.values())


def _place(ws: Workspace, table: ExternalTable) -> Location:
    found = ws.locate(table.path)
    return found.as_plain() if is_uri(table.path) else found


def _version(path: Location, table: ExternalTable) -> str:
    if table.format == "delta":
        return str(DeltaLog(path).version)
    found = path.infos() or {".": path.info()}
    in_order = sorted(found.items(), key=lambda of: of[0].split("/"))
    # A store's times may be of seconds.
    listed = [(name, info.size, info.tag or info.modified_ns) for name, info in in_order]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def _see(path: Location, table: ExternalTable) -> None:
    there = (path / "_delta_log").is_dir() if table.format == "delta" else path.exists()
    if not there:
        raise UserError(f"{table.where}: there is no {table.format} table {path}")


def _check_type(table: ExternalTable, name: str, wanted: ValueType, there: str | None, names: Sequence[str]) -> None:
    where = f"{table.where}: table {table.path}"
    if there is None:
        raise UserError(f"{where} has no column '{name}' (there are: {', '.join(names)})")
    if table.format == "csv":
        if wanted.is_list:
            raise UserError(f"{where}: '{name}' is wanted as {wanted}; CSV has no lists")
        return
    wider = {"int": {"smallint", "tinyint"}, "bigint": {"int", "smallint", "tinyint"}, "double": {"float"}}
    if there != str(wanted) and (wanted.is_list or there not in wider.get(wanted.element, set())):
        raise UserError(f"{where}: column '{name}' is {there}, but {wanted} is wanted; change the spec or the table")


def refuse_duplicates(table: str, what: str, keys: int, rows: int) -> None:
    """Raises:
    UserError: some of the external table's keys have several rows.
    """
    if keys:
        raise UserError(
            f"features.prepare: in {table} {keys} values of {what} have more than one row ({rows} rows); make it "
            f"unique, or say on_duplicate: first and by which order"
        )


def duplicates_spark(frame: DataFrame, keys: Sequence[str]) -> tuple[int, int]:
    """(keys that have several rows, those rows). One Spark job."""
    from pyspark.sql import functions as F

    from headrace.features.functions.spark_expressions import col

    counted = frame.groupBy(*[col(k) for k in keys]).agg(F.count(F.lit(1)).alias("n")).where(F.col("n") > 1)
    row = counted.agg(F.count(F.lit(1)), F.coalesce(F.sum("n"), F.lit(0))).collect()[0]
    return int(row[0]), int(row[1])
