"""The files of an Iceberg snapshot: its manifest list names manifests, which name data files and delete files.

All are Avro, and none ever changes. Which rows a delete file removes is left to Iceberg's own reader; here is only told
which data files it may touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.errors import UserError
from headrace.lake.iceberg.metadata import TableMetadata, named_place
from headrace.storage import Location

#: Manifests that are read at once.
_READERS = 8
#: Status of a manifest's entry whose file is no longer part of the table.
_DELETED = 2
#: Contents of files, and of manifests.
_DATA, _POSITION_DELETES, _EQUALITY_DELETES = 0, 1, 2
#: Id of the column of a position delete file that has the paths of data files.
_FILE_PATH = 2147483546


@dataclass(frozen=True)
class SnapshotFile:
    """A live data file."""

    #: As the manifest spells it, and as `_file` of Iceberg's reader.
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
    """The live data files of a snapshot.

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
            entries = [e for found in pool.map(_live, manifests) for e in found]
    except FileNotFoundError as e:
        raise UserError(
            f"source: snapshot {snapshot_id} of {metadata.location} has expired: {e.filename or e} is gone. Run ingest "
            f"again, which takes a newer one (or change source.version), and keep snapshots for longer "
            f"(history.expire.max-snapshot-age-ms)"
        ) from None
    deletes = _Deletes(e for e in entries if e.content != _DATA)
    return [_data_file(e, metadata, deletes.of(e)) for e in entries if e.content == _DATA]


def _live(manifest: Mapping[str, Any]) -> list[_Entry]:
    found = []
    for entry in _read(named_place(manifest["manifest_path"])):
        if entry["status"] != _DELETED:
            file = entry["data_file"]
            found.append(_Entry(file, manifest["partition_spec_id"], tuple((file.get("partition") or {}).values())))
    return found


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
                found = self._by_file.setdefault(only, [])
            elif entry.content == _EQUALITY_DELETES and not entry.partition:
                found = self._everywhere
            else:
                found = self._by_partition.setdefault((entry.spec_id, entry.partition), [])
            # Deletion vectors of many data files share a file.
            found.append(f"{entry.file['file_path']}@{entry.file.get('content_offset') or 0}")

    def of(self, entry: _Entry) -> tuple[str, ...]:
        """Those that may touch a data file."""
        of_partition = self._by_partition.get((entry.spec_id, entry.partition), ())
        return tuple(sorted([*self._everywhere, *of_partition, *self._by_file.get(entry.file["file_path"], ())]))


def _only_file(entry: _Entry) -> str | None:
    """The one data file that a file of position deletes is about; None: there are several."""
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
