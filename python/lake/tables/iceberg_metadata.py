"""An Iceberg table's metadata and manifests, read without Spark. Written to Iceberg's specification.

Metadata files are JSON, a new one for each version of the table. A table that only has a path keeps the number of the
newest in `version-hint.text` (Iceberg's HadoopTables and hadoop catalogs). Of any other table the catalog alone knows
the newest: a failed commit leaves a file, too. A snapshot's manifest list names manifests, which name data files and
delete files, all in Avro. None of these files ever changes. Which rows a delete file removes is left to Iceberg's own
reader; this module only tells which data files it may touch.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.errors import UserError
from headrace.storage import Location, StoreAway, local, location_named

#: Supported versions of Iceberg's table format.
FORMAT_VERSIONS = (1, 2, 3)
_HINT = "version-hint.text"
_NUMBERED = re.compile(r"v(\d+)(\.gz)?\.metadata\.json(\.gz)?")
_ANY = re.compile(r"(v?)(\d+)[^/]*\.metadata\.json(\.gz)?")
#: Concurrent reads of manifests.
_READERS = 8
#: Status of a manifest's entry whose file is no longer part of the table.
_DELETED = 2
#: Content codes of files and manifests.
_DATA, _POSITION_DELETES, _EQUALITY_DELETES = 0, 1, 2
#: Id of the column of a position delete file that has the paths of data files.
_FILE_PATH = 2147483546


@dataclass(frozen=True)
class TableMetadata:
    """One metadata file."""

    file: Location
    content: Mapping[str, Any]

    @property
    def location(self) -> str:
        """Return the table's folder, as a path or URI."""
        return str(self.content["location"])

    @property
    def current(self) -> int | None:
        """Id of the newest snapshot of the main branch; None of a table that nobody has written to."""
        snapshot_id = self.content.get("current-snapshot-id")
        return None if snapshot_id in (None, -1) else int(snapshot_id)

    @cached_property
    def snapshots(self) -> Mapping[int, Mapping[str, Any]]:
        """Return the snapshots that are not expired, by id."""
        return {int(s["snapshot-id"]): s for s in self.content.get("snapshots") or ()}

    def as_of(self, milliseconds: float) -> int | None:
        """Id of what was the newest snapshot at a time since 1970, UTC; None: it is not known any more, or was none."""
        log = self.content.get("snapshot-log") or ()
        earlier = [int(e["snapshot-id"]) for e in log if e["timestamp-ms"] <= milliseconds]
        return earlier[-1] if earlier and earlier[-1] in self.snapshots else None

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return all that it knows of."""
        return list(self.content.get("schemas") or [self.content["schema"]])

    def schema(self, snapshot_id: int) -> Mapping[str, Any]:
        """Return the columns of a snapshot."""
        schema_id = self.snapshots[snapshot_id].get("schema-id", self.content.get("current-schema-id", 0))
        return next((s for s in self.schemas if s.get("schema-id", 0) == schema_id), self.schemas[-1])

    def partition_fields(self, spec_id: int) -> list[Mapping[str, Any]]:
        """Return the fields of one of its partition specs, in order."""
        specs = self.content.get("partition-specs")
        if specs is None:
            return list(self.content.get("partition-spec") or ())
        return list(next(s["fields"] for s in specs if s["spec-id"] == spec_id))

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties of the table."""
        return self.content.get("properties") or {}


def named_place(uri: str, key: str = "source") -> Location:
    """Return the place that a table's metadata, or a catalog, names: not encoded, and of a local file `file:/PATH`,
    too.

    Args:
        uri: of a file or folder.
        key: begins the message.

    Raises:
        UserError: it is in a store that is not known, or at a place that headrace's paths cannot name.
    """
    scheme, colon, path = uri.partition(":")
    if not colon or "/" in scheme:
        return local(uri)
    if scheme == "file":
        return local("/" + path.lstrip("/"))
    return location_named(uri, key).as_plain()


def read_metadata(file: Location) -> TableMetadata:
    """Return a metadata file.

    Raises:
        UserError: it is not there, is none, or of a version of Iceberg's format that is not known.
    """
    try:
        data = file.read_bytes()
        content = json.loads(gzip.decompress(data) if ".gz" in file.name else data)
        version = content["format-version"]
    except FileNotFoundError:
        raise UserError(f"source: there is no metadata file {file}") from None
    except StoreAway:  # the store is away: the file may be intact
        raise
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"source: {file} is no metadata file of an Iceberg table: {e}") from None
    if version not in FORMAT_VERSIONS:
        raise UserError(
            f"source: {file}: this table is of version {version} of Iceberg's format, and headrace reads "
            f"{', '.join(map(str, FORMAT_VERSIONS))}; write its rows to a table of one of these"
        )
    return TableMetadata(file, content)


def newest_metadata(folder: Location) -> TableMetadata:
    """Return the newest version of a table that only has a path.

    Raises:
        UserError: there is none, or a catalog must be asked.
    """
    files = {int(m[1]): f for f in folder.entries() if (m := _NUMBERED.fullmatch(f.name))}
    if not files:
        if any(_ANY.fullmatch(f.name) for f in folder.entries()):
            raise UserError(
                f"source.path: the newest version of the Iceberg table at {folder.parent} is known to its catalog "
                f"alone: give its name (source.table: catalog.database.table) and the catalog in spark.properties, or "
                f"source.version: a snapshot id"
            )
        raise UserError(f"source: there is no Iceberg table at {folder.parent}; change source.path")
    version = _hint(folder)
    if version not in files:
        return read_metadata(files[max(files)])
    # Writers write the hint last, and may be killed before.
    while version + 1 in files:
        version += 1
    return read_metadata(files[version])


def metadata_with(folder: Location, snapshot_id: int) -> TableMetadata | None:
    """Return a metadata file that knows a snapshot, newest first; None: the snapshot was never there, or has expired.

    Which one does not matter: a snapshot is the same in all.
    """
    named = [(m, f) for f in folder.entries() if (m := _ANY.fullmatch(f.name))]
    for _, file in sorted(named, key=lambda metadata: int(metadata[0][2]), reverse=True):
        metadata = read_metadata(file)
        if snapshot_id in metadata.snapshots:
            return metadata
    return None


def primitives(type_: Any) -> set[str]:
    """Return the names of all types within a schema or type, at any depth."""
    if isinstance(type_, str):
        return {type_}
    parts = [f["type"] for f in type_.get("fields", ())] + [type_[k] for k in ("element", "key", "value") if k in type_]
    return {name for part in parts for name in primitives(part)}


def _hint(folder: Location) -> int:
    """-1 where there is none."""
    try:
        return int((folder / _HINT).read_text())
    except (FileNotFoundError, ValueError):
        return -1


@dataclass(frozen=True)
class SnapshotFile:
    """A live data file."""

    #: Path as spelled in the manifest, and in `_file` of Iceberg's reader.
    name: str
    path: Location
    #: Bytes.
    size: int
    #: parquet, orc, avro.
    format: str
    #: Values of the partition by the ids of the partition spec's source columns, of identity transforms alone.
    partition: Mapping[int, Any]
    #: Least and greatest value by column id, as Iceberg serialises single values.
    lower: Mapping[int, bytes]
    upper: Mapping[int, bytes]
    #: Rows in which a column is null, by its id.
    nulls: Mapping[int, int]
    #: Delete files that may remove rows of it, by name.
    deletes: tuple[str, ...]
    encrypted: bool


@dataclass(frozen=True)
class _Entry:
    file: Mapping[str, Any]
    spec_id: int
    #: Values of the partition spec's fields.
    partition: tuple[Any, ...]

    @property
    def content(self) -> int:
        return int(self.file.get("content") or _DATA)


def snapshot_files(metadata: TableMetadata, snapshot_id: int) -> list[SnapshotFile]:
    """Return the live data files of a snapshot.

    Raises:
        UserError: manifests are gone (the snapshot has expired), or files are in a store that is not known.
    """
    snapshot = metadata.snapshots[snapshot_id]
    if "manifest-list" not in snapshot:
        raise UserError(
            f"source: snapshot {snapshot_id} of {metadata.location} has no manifest list, as the first writers of "
            f"Iceberg left it out; rewrite its manifests (CALL catalog.system.rewrite_manifests)"
        )
    try:
        manifests = list(_read(named_place(snapshot["manifest-list"])))
        with ThreadPoolExecutor(_READERS) as pool:
            entries = [e for live_entries in pool.map(_live, manifests) for e in live_entries]
    except FileNotFoundError as e:
        raise UserError(
            f"source: snapshot {snapshot_id} of {metadata.location} has expired: {e.filename or e} is gone. Run ingest "
            f"again, which takes a newer one (or change source.version), and keep snapshots for longer "
            f"(history.expire.max-snapshot-age-ms)"
        ) from None
    deletes = _Deletes(e for e in entries if e.content != _DATA)
    return [_data_file(e, metadata, deletes.touching(e)) for e in entries if e.content == _DATA]


def _live(manifest: Mapping[str, Any]) -> list[_Entry]:
    live_entries = []
    for entry in _read(named_place(manifest["manifest_path"])):
        if entry["status"] != _DELETED:
            file = entry["data_file"]
            live_entries.append(
                _Entry(file, manifest["partition_spec_id"], tuple((file.get("partition") or {}).values()))
            )
    return live_entries


class _Deletes:
    """The delete files of a snapshot by the data files that they may touch.

    By order of writing a delete file may be older than a data file: then it removes nothing of it, and is named all the
    same.
    """

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._everywhere: list[str] = []
        self._by_partition: dict[Any, list[str]] = {}
        self._by_file: dict[str, list[str]] = {}
        for entry in entries:
            only = _only_file(entry)
            if only is not None:
                names = self._by_file.setdefault(only, [])
            elif entry.content == _EQUALITY_DELETES and not entry.partition:
                names = self._everywhere
            else:
                names = self._by_partition.setdefault((entry.spec_id, entry.partition), [])
            # Deletion vectors of many data files share a file.
            names.append(f"{entry.file['file_path']}@{entry.file.get('content_offset') or 0}")

    def touching(self, entry: _Entry) -> tuple[str, ...]:
        """Return the names of delete files that may remove rows of a data file."""
        of_partition = self._by_partition.get((entry.spec_id, entry.partition), ())
        return tuple(sorted([*self._everywhere, *of_partition, *self._by_file.get(entry.file["file_path"], ())]))


def _only_file(entry: _Entry) -> str | None:
    """Return the one data file that a file of position deletes is about; None: there are several."""
    only: str | None = entry.file.get("referenced_data_file")
    if only is None and entry.content == _POSITION_DELETES:
        low, high = (_by_column(entry.file.get(f"{side}_bounds")).get(_FILE_PATH) for side in ("lower", "upper"))
        only = low.decode() if low is not None and low == high else None
    return only


def _data_file(entry: _Entry, metadata: TableMetadata, deletes: tuple[str, ...]) -> SnapshotFile:
    file = entry.file
    fields = metadata.partition_fields(entry.spec_id)
    identity = {
        int(field["source-id"]): value
        for field, value in zip(fields, entry.partition, strict=True)
        if field["transform"] == "identity"
    }
    return SnapshotFile(
        name=file["file_path"],
        path=named_place(file["file_path"]),
        size=int(file["file_size_in_bytes"]),
        format=str(file["file_format"]).lower(),
        partition=identity,
        lower=_by_column(file.get("lower_bounds")),
        upper=_by_column(file.get("upper_bounds")),
        nulls=_by_column(file.get("null_value_counts")),
        deletes=deletes,
        encrypted=file.get("key_metadata") is not None,
    )


def _by_column(pairs: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None) -> dict[int, Any]:
    """Avro has maps of text alone, so Iceberg writes a list of pairs."""
    if isinstance(pairs, Mapping):
        return {int(k): v for k, v in pairs.items()}
    return {int(p["key"]): p["value"] for p in pairs or ()}


def _read(file: Location) -> Iterator[dict[str, Any]]:
    # Late: only a source that is an Iceberg table needs it.
    from fastavro import reader

    with file.open() as f:
        try:
            yield from reader(f)  # type: ignore[misc]
        except (ValueError, EOFError) as e:
            raise UserError(f"source: {file} cannot be read as Avro: {e}") from None
