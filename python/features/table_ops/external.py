"""Other tables that a pipeline reads: Delta, Parquet or CSV by path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from headrace.config.section import PathText
from headrace.errors import UserError
from headrace.features.table_ops.base import ExternalTable, TableOp, TableSchema
from headrace.features.types import OpError, ValueType, declared
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Input
from headrace.schema import ColumnType, TableColumn
from headrace.storage import Location
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ReadsExternalTable(TableOp):
    """The parameters that operators with an external table share."""

    #: A folder (or file), relative to the workspace's home unless absolute.
    path: PathText
    format: Literal["delta", "parquet", "csv"] = "delta"
    #: Names of the key in both tables, or column of the events -> column of the external table.
    keys: Mapping[str, str] = Field(min_length=1)
    #: The columns to take: name in the external table -> type.
    add: Mapping[str, ColumnType] = Field(min_length=1)
    #: Put before the names of the columns that are added.
    prefix: str = ""

    @field_validator("keys", mode="before")
    @classmethod
    def _same_names(cls, value: Any) -> Any:
        return {k: k for k in value} if isinstance(value, (list, tuple)) else value

    def _added(self) -> dict[str, ValueType]:
        return {f"{self.prefix}{n}": declared(TableColumn(name=n, type=t)) for n, t in self.add.items()}

    def _external(self, schema: TableSchema, more: Mapping[str, ValueType]) -> ExternalTable:
        types: dict[str, ValueType] = {}
        wanted = [(theirs, schema.key(ours)) for ours, theirs in self.keys.items()]
        wanted += [*more.items(), *((n, declared(TableColumn(name=n, type=t))) for n, t in self.add.items())]
        for name, type_ in wanted:
            if types.setdefault(name, type_) != type_:
                raise OpError(f"column '{name}' of {self.path} is wanted as {types[name]} and as {type_}")
        return ExternalTable(self.path, self.format, types)


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
                    f"features.prepare: the manifest of the features names no version of the {table.format} table "
                    f"{table.path}; run the features stage again"
                )
        return ExternalReader(ws, {t: pinned[t.format, t.path] for t in tables})

    def path(self, table: ExternalTable) -> Location:
        """Where it is."""
        return self._ws.locate(table.path)

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
            raise UserError(
                f"features.prepare: the files of {self.path(table)} have changed since the features stage looked at "
                f"them, and {table.format} keeps no older versions; run the features stage again"
            )

    def spark(self, spark: SparkSession, table: ExternalTable) -> DataFrame:
        """The wanted columns in their types.

        Raises:
            UserError: the table or a column is not there, a column has another type, or files are not as pinned.
        """
        from headrace.features.functions.spark_expressions import col

        path = self.path(table)
        self._check(table)
        reader = spark.read.format(table.format)
        if table.format == "delta":
            if table in self._pinned:
                reader = reader.option("versionAsOf", int(self._pinned[table]))
            frame = reader.load(str(path))
        elif table.format == "csv":
            # A schema would go by position; texts are cast by name below.
            frame = reader.option("header", True).option("mode", "FAILFAST").load(str(path))
        else:
            frame = reader.load(str(path))
        there = dict(frame.dtypes)
        for name, type_ in table.columns.items():
            _check_type(table, name, type_, there.get(name), list(there))
        return frame.select(*[col(n).cast(str(t)).alias(n) for n, t in table.columns.items()])


def pin(ws: Workspace, tables: Sequence[ExternalTable]) -> tuple[Input, ...]:
    """What identifies the tables as they are now: a Delta table's version; of others a digest of names, sizes, times.

    Raises:
        UserError: one of them is not there.
    """
    found = {}
    for table in tables:
        path = ws.locate(table.path)
        _see(path, table)
        found[table.format, table.path] = Input(kind=table.format, name=table.path, version=_version(path, table))
    return tuple(found.values())


def _version(path: Location, table: ExternalTable) -> str:
    if table.format == "delta":
        return str(DeltaLog(path).version)
    found = [(p, p.info()) for p in (path.files() if path.is_dir() else [path])]
    listed = [(p.below(path), info.size, info.modified_ns) for p, info in found]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def _see(path: Location, table: ExternalTable) -> None:
    there = (path / "_delta_log").is_dir() if table.format == "delta" else path.exists()
    if not there:
        raise UserError(f"features.prepare: there is no {table.format} table {path}")


def _check_type(table: ExternalTable, name: str, wanted: ValueType, there: str | None, names: Sequence[str]) -> None:
    where = f"features.prepare: table {table.path}"
    if there is None:
        raise UserError(f"{where} has no column '{name}' (there are: {', '.join(names)})")
    if table.format == "csv":
        if wanted.is_list:
            raise UserError(f"{where}: '{name}' is wanted as {wanted}; CSV has no lists")
        return
    wider = {"int": {"smallint", "tinyint"}, "bigint": {"int", "smallint", "tinyint"}, "double": {"float"}}
    if there != str(wanted) and (wanted.is_list or there not in wider.get(wanted.element, set())):
        raise UserError(f"{where}: column '{name}' is {there}, but {wanted} is wanted; change the spec or the table")


def refuse_duplicates(path: str, what: str, keys: int, rows: int) -> None:
    """Raises:
    UserError: some of the external table's keys have several rows.
    """
    if keys:
        raise UserError(
            f"features.prepare: in table {path} {keys} values of {what} have more than one row ({rows} rows); make it "
            f"unique, or say on_duplicate: first and by which order"
        )


def duplicates_spark(frame: DataFrame, keys: Sequence[str]) -> tuple[int, int]:
    """(keys that have several rows, those rows). One Spark job."""
    from pyspark.sql import functions as F

    from headrace.features.functions.spark_expressions import col

    counted = frame.groupBy(*[col(k) for k in keys]).agg(F.count(F.lit(1)).alias("n")).where(F.col("n") > 1)
    row = counted.agg(F.count(F.lit(1)), F.coalesce(F.sum("n"), F.lit(0))).collect()[0]
    return int(row[0]), int(row[1])
