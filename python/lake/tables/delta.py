"""Delta tables as sources: files by the table's log, rows by Spark.

Rows of a plain table (no deletion vectors, no column mapping) are read from its data files as Parquet, which gives
their positions. Others are read by Delta itself, which knows what is deleted and how columns are named.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import TableSource
from headrace.config.schema import unique_names
from headrace.errors import UserError
from headrace.lake.delta.log import FEATURE, DataFile, DeltaLog, TableState, check_listable, commit_times, newest_until
from headrace.lake.tables.days import Bounds, days_of_file, with_day_filter
from headrace.lake.tables.parquet import named, read_parquet
from headrace.lake.tables.snapshot import (
    FILE,
    LINE,
    FileSnapshot,
    OneSchemaRows,
    TableFile,
    files_of,
    relative_file,
    relative_name,
)
from headrace.storage import Location

_PHYSICAL = "delta.columnMapping.physicalName"


def pinned_version(source: TableSource, folder: Location) -> int:
    """Return the version that the spec asks for: the newest unless it names another.

    Raises:
        UserError: there is no table, or no such version.
    """
    log = DeltaLog(folder)
    newest = log.version
    if newest is None:
        raise UserError(f"source: there is no Delta table at {folder}; change source.path")
    if source.version is not None:
        if source.version > newest:
            raise UserError(f"source.version: the newest version of {source.title} is {newest}, not {source.version}")
        return source.version
    if source.as_of is None:
        return newest
    limit = int(datetime.fromisoformat(source.as_of).timestamp() * 1e3)
    version = newest_until(commit_times(log), limit)
    if version is None:
        raise UserError(f"source.as_of: the log of {source.title} has no commit up to {source.as_of}")
    return version


@dataclass(frozen=True)
class DeltaSnapshot(FileSnapshot, OneSchemaRows):
    """A Delta table at one version."""

    source: TableSource
    folder: Location
    version: int
    format: str = "delta"
    versioned: bool = True

    @cached_property
    def _state(self) -> TableState:
        state = DeltaLog(self.folder).state(self.version)
        if state is None:
            raise UserError(
                f"source: the log of {self.source.title} no longer reaches back to version {self.version}; take a "
                f"newer one, and keep the log for longer (delta.logRetentionDuration)"
            )
        check_listable(self.folder, state.protocol)
        return state

    @cached_property
    def schema(self) -> T.StructType:
        """Return all columns, by their logical names. Raises UserError where two differ in case alone."""
        schema = T.StructType.fromJson(json.loads(self._state.metadata["schemaString"]))
        for name, unique in zip(schema.names, unique_names(schema.names), strict=True):
            if name != unique:
                twin = next(n for n in schema.names if n.lower() == name.lower())
                raise UserError(
                    f"source: {self.source.title} has columns '{twin}' and '{name}', which differ in case alone, and "
                    f"neither Spark nor Delta reads such a table: have one of them renamed"
                )
        return schema

    def check(self) -> None:
        """Raise UserError where the version is gone, or the table has features that are not known."""
        _ = self._state

    @property
    def is_mapped(self) -> bool:
        """Return whether columns have other names in data files than in the table."""
        return self._state.configuration.get("delta.columnMapping.mode", "none") != "none"

    @property
    def plain(self) -> bool:
        state = self._state
        # Arrow casts some of the types that writers may have widened differently from Delta.
        features = set(state.unknown_features) | ({FEATURE} & set(state.protocol.get("readerFeatures") or ()))
        return not self.is_mapped and not features and not any(f.deleted for f in self.data_files)

    @cached_property
    def data_files(self) -> list[DataFile]:
        """Return the live data files as the log has them."""
        return self._state.data_files(self.folder)

    @cached_property
    def files(self) -> list[TableFile]:
        # By their names in files and statistics. Other names in a mapped table's files belong to dropped columns.
        physical = {str(f.metadata.get(_PHYSICAL, f.name)): f.name.lower() for f in self.schema.fields}
        time = None if self.source.day is None else self.source.day.time
        time_column = None if time is None else self._physical_name(time)
        files = []
        for file, add in zip(self.data_files, self._state.adds, strict=True):
            partition = {physical.get(k, k.lower()): v or None for k, v in file.partition.items()}
            bounds = None if time is None else _bounds(add, time_column)
            first, last = days_of_file(self.source, partition, bounds)
            identity = f"{file.vector}:{file.deleted}" if file.deleted else ""
            name = relative_name(file.path, self.folder)
            lacks = bounds is not None and _may_be_null(add, time_column)
            files.append(TableFile(name, file.path, int(add["size"]), identity, first, last, partition, lacks))
        return sorted(files, key=lambda f: f.name)

    def _physical_name(self, name: str) -> str | None:
        """Return a column's name in files and statistics: fields of a struct stand below the struct's name there."""
        fields = named(self.schema, name)
        return str(fields[0].metadata.get(_PHYSICAL, fields[0].name)) if fields else None

    def pin(self, days: Mapping[str, str]) -> str:
        return str(self.version)

    def rows(self, spark: SparkSession, days: Collection[str] | None) -> DataFrame:
        if self.plain:
            columns = set(self._state.metadata["partitionColumns"])
            return read_parquet(spark, self.folder, files_of(self, days), self.schema, columns)
        frame = spark.read.format("delta").option("versionAsOf", self.version).load(str(self.folder))
        # Delta has row positions only for tables that may have deletion vectors.
        with suppress(AnalysisException):
            frame = frame.select(
                "*",
                relative_file(self.folder, F.col("_metadata.file_path")).alias(FILE),
                F.col("_metadata.row_index").alias(LINE),
            )
        return frame if days is None else with_day_filter(frame, self.source, self.files, days)


def _may_be_null(add: Mapping[str, Any], column: str | None) -> bool:
    """Return whether a top-level column may be null in a row of a file, by its statistics."""
    return (json.loads(add["stats"]).get("nullCount") or {}).get(column) != 0


def _bounds(add: Mapping[str, Any], column: str | None) -> Bounds | None:
    """Return least and greatest value of a top-level column in a file by its statistics."""
    stats = json.loads(add["stats"]) if add.get("stats") else {}
    low, high = ((stats.get(kind) or {}).get(column) for kind in ("minValues", "maxValues"))
    return None if low is None or high is None else (low, high)
