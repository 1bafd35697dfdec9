"""Other tables that operators join: Delta, Parquet or CSV by path, or a named source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.errors import UserError
from headrace.features.table_ops.base import ExternalTable
from headrace.features.types import ValueType
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Input
from headrace.storage import Location, is_uri
from headrace.workspace import Workspace

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
