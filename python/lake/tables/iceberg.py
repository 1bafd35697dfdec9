"""Iceberg tables as sources: files by the table's metadata, rows by Iceberg's own reader.

A snapshot never changes, and is read by its id through a metadata file that knows it. So a catalog is asked for the
newest snapshot, and for nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.errors import UserError
from headrace.lake.tables.days import Bounds, days_of_file, with_day_filter
from headrace.lake.tables.iceberg_metadata import (
    SnapshotFile,
    TableMetadata,
    metadata_with,
    named_place,
    newest_metadata,
    primitives,
    read_metadata,
    snapshot_files,
)
from headrace.lake.tables.snapshot import (
    FILE,
    LINE,
    FileSnapshot,
    OneSchemaRows,
    Snapshot,
    TableFile,
    TablePlace,
    one_spelling,
)
from headrace.stage.manifest import fingerprint
from headrace.storage import Location, location_of

_EPOCH = datetime(1970, 1, 1)
#: Property of tables whose files were not written by Iceberg: columns are found by name, partitions are not in files.
_NAME_MAPPING = "schema.name-mapping.default"


def pinned_snapshot(
    source: TableSource, folder: Location, newest: str | None, pinned: int | None
) -> tuple[TableMetadata, int]:
    """Return a metadata file, and the snapshot that is read.

    Args:
        source: may name a snapshot or a time.
        folder: of the table.
        newest: the metadata file that a catalog names as the newest; None: the folder's newest.
        pinned: the snapshot that an earlier run has pinned; None: the one that the spec asks for.

    Raises:
        UserError: there is no table, or no such snapshot.
    """
    metadata_folder = folder / "metadata" if newest is None else named_place(newest).parent
    requested = source.version if pinned is None else pinned
    if requested is not None:
        metadata_file = metadata_with(metadata_folder, requested)
        if metadata_file is None:
            if pinned is None:
                raise UserError(f"source.version: {source.title} has no snapshot {requested}{_known(metadata_folder)}")
            raise UserError(
                f"source: snapshot {requested} of {source.title} has expired. Run ingest again, which takes a newer "
                f"one, and keep snapshots for longer (history.expire.max-snapshot-age-ms)"
            )
        return metadata_file, requested
    metadata = newest_metadata(metadata_folder) if newest is None else read_metadata(named_place(newest))
    if source.as_of is None:
        if metadata.current is None:
            raise UserError(f"source: {source.title} is empty: nobody has written rows to it yet")
        return metadata, metadata.current
    found_id = metadata.as_of(datetime.fromisoformat(source.as_of).timestamp() * 1000)
    if found_id is None:
        raise UserError(
            f"source.as_of: {source.title} has no snapshot of {source.as_of}: the table is younger, or what was the "
            f"newest then has expired"
        )
    return metadata, found_id


def _known(folder: Location) -> str:
    """Return the newest snapshots of a table that only has a path, for a message."""
    try:
        known = list(newest_metadata(folder).snapshots)
    except UserError:
        return ""
    return f"; its newest are {', '.join(map(str, known[-3:]))}" if known else ""


@dataclass(frozen=True)
class IcebergSnapshot(FileSnapshot, OneSchemaRows):
    """An Iceberg table at one snapshot."""

    source: TableSource
    metadata: TableMetadata
    snapshot_id: int
    format: str = "iceberg"
    versioned: bool = True

    @cached_property
    def _files(self) -> list[SnapshotFile]:
        return snapshot_files(self.metadata, self.snapshot_id)

    @cached_property
    def _columns(self) -> Mapping[int, Mapping[str, Any]]:
        return {int(f["id"]): f for f in self.metadata.schema(self.snapshot_id)["fields"]}

    @property
    def _time(self) -> Mapping[str, Any] | None:
        """Return the column that `day.time` names."""
        name = self.source.day and self.source.day.time
        same = [f for f in self._columns.values() if name and f["name"].lower() == name.lower()]
        return next((f for f in same if f["name"] == name), same[0] if same else None)

    @cached_property
    def _root(self) -> Location:
        return named_place(self.metadata.location)

    @property
    def plain(self) -> bool:
        # Columns are found by their ids: where the schema has changed, a file may have another name for one.
        schema, *older_schemas = self.metadata.schemas
        if older_schemas or schema.get("schema-id") or _NAME_MAPPING in self.metadata.properties:
            return False
        # Spark reads a UUID as text; files have its bytes.
        if "uuid" in primitives(schema):
            return False
        return all(f.format == "parquet" and not f.deletes and not f.encrypted for f in self._files)

    @cached_property
    def files(self) -> list[TableFile]:
        return sorted(map(self._file, self._files), key=lambda f: f.name)

    def _file(self, file: SnapshotFile) -> TableFile:
        columns = self._columns
        partition = {columns[i]["name"].lower(): _text(v) for i, v in file.partition.items() if i in columns}
        first, last = days_of_file(self.source, partition, self._bounds(file))
        identity = fingerprint({"deletes": list(file.deletes)}) if file.deletes else ""
        outside = f"file:{file.path}" if file.path.scheme == "file" else str(file.path)
        name = file.path.below(self._root) if file.path.is_below(self._root) else outside
        time = self._time
        lacks = time is not None and file.nulls.get(int(time["id"])) != 0
        return TableFile(name, file.path, file.size, identity, first, last, partition, lacks)

    def _bounds(self, file: SnapshotFile) -> Bounds | None:
        """Least and greatest value of `day.time`."""
        field = self._time
        if field is None:
            return None
        low, high = (_value(field["type"], side.get(int(field["id"]))) for side in (file.lower, file.upper))
        return None if low is None or high is None else (low, high)

    def pin(self, days: Mapping[str, str]) -> str:
        return str(self.snapshot_id)

    def rows(self, spark: SparkSession, days: Collection[str] | None) -> DataFrame:
        reader = spark.read.format("iceberg").option("snapshot-id", str(self.snapshot_id))
        try:
            frame = reader.load(str(self.metadata.file))
            frame = frame.select("*", self._relative().alias(FILE), F.col("_pos").alias(LINE))
        except PySparkException as e:
            raise UserError(f"source: {self.source.title} cannot be read: {str(e).splitlines()[0]}") from e
        return frame if days is None else with_day_filter(frame, self.source, self.files, days)

    def _relative(self) -> Column:
        """`_source_file`: as `TableFile.name`."""
        if self._root.scheme == "file":
            path = F.regexp_replace("_file", "^file:/*", "/")
            outside = F.concat(F.lit("file:"), path)
        else:
            path = outside = one_spelling(self._root.scheme, F.col("_file"))
        root = f"{self._root}/"
        return F.when(path.startswith(root), F.substr(path, F.lit(len(root) + 1))).otherwise(outside)


def _value(type_: Any, data: bytes | None) -> date | datetime | None:
    """Return a value of a date or timestamp as Iceberg serialises single values; None: of another type."""
    if data is None or type_ not in ("date", "timestamp", "timestamptz"):
        return None
    try:
        if type_ == "date":
            return (_EPOCH + timedelta(days=struct.unpack("<i", data)[0])).date()
        moment = _EPOCH + timedelta(microseconds=struct.unpack("<q", data)[0])
    except OverflowError:  # a year before 1 or after 9999
        return None
    return moment if type_ == "timestamp" else moment.replace(tzinfo=UTC)


def _text(value: Any) -> str | None:
    """Return the value of a partition column as Spark casts it to text."""
    return None if value is None else str(value)


def open_iceberg(
    source: TableSource, table: Table, place: TablePlace, days: Mapping[str, str], version: str | None
) -> Snapshot:
    """Open an Iceberg table; arguments as of `headrace.lake.tables.opened.open_table`."""
    pinned = None if version is None else int(version)
    folder = location_of(place.path).as_plain()
    return IcebergSnapshot(source, *pinned_snapshot(source, folder, place.metadata, pinned))
