"""Checkpoints of a Delta table's log: the state of a version in Parquet (or JSON) files.

Three kinds, by PROTOCOL.md of delta-io/delta: classic (`N.checkpoint.parquet`), multi-part
(`N.checkpoint.PART.PARTS.parquet`), and V2 (`N.checkpoint.UUID.parquet|json`, or named as a classic one), whose `add`
actions may be in sidecar files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.damage import whole_checkpoint
from headrace.storage import Location, local, location_of

_NAME = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-fA-F-]{36})?\.(parquet|json)")
_SIDECARS = "_sidecars"
#: What is read of each action, where a file has it. Statistics may be text, a struct, or both.
_FIELDS = {
    "add": (
        "path",
        "partitionValues",
        "size",
        "modificationTime",
        "stats",
        "deletionVector",
        "stats_parsed.numRecords",
    ),
    "metaData": (
        "id",
        "name",
        "description",
        "format",
        "schemaString",
        "configuration",
        "partitionColumns",
        "createdTime",
    ),
    "protocol": ("minReaderVersion", "minWriterVersion", "readerFeatures", "writerFeatures"),
    "txn": ("appId", "version"),
    "sidecar": ("path",),
}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    version: int
    files: tuple[Location, ...]

    def actions(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """The actions of some kinds (`add`, `metaData`, `protocol`, `txn`), each as {kind: fields}."""
        for file in self.files:
            for action in _read(file, (*kinds, "sidecar")):
                sidecar = action.get("sidecar")
                if sidecar is None:
                    yield action
                elif "add" in kinds:
                    yield from _read(_sidecar(file.parent, sidecar["path"]), ("add",))


def complete_checkpoints(log: Location) -> list[Checkpoint]:
    """All complete checkpoints of the log in this folder, oldest first."""
    # By version and number of parts: (0 for a checkpoint that is one file).
    found: dict[tuple[int, int], list[Location]] = {}
    for path in log.entries():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.setdefault((int(match.group(1)), int(match.group(3) or 0)), []).append(path)
    # Several of one version that are one file each are alternatives, each of them whole.
    return [
        Checkpoint(version, tuple(files) if parts else (files[0],))
        for (version, parts), files in sorted(found.items(), key=lambda of: of[0])
        if not parts or len(files) == parts
    ]


def newest_checkpoint(log: Location, at_most: int) -> Checkpoint | None:
    """The newest complete checkpoint of a version up to `at_most` that can be read, of the log in this folder."""
    found = (c for c in reversed(complete_checkpoints(log)) if c.version <= at_most)
    return next((c for c in found if all(map(whole_checkpoint, c.files))), None)


def _sidecar(log: Location, path: str) -> Location:
    name = unquote(path)
    if "/" not in name:
        return log / _SIDECARS / name
    return location_of(name) if ":/" in name else local(name)


def _read(path: Location, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if path.suffix == ".json":
        for line in path.read_text().splitlines():
            action = json.loads(line)
            yield from ({kind: action[kind]} for kind in kinds if action.get(kind))
        return
    file = pq.ParquetFile(path)
    columns = [f"{kind}.{field}" for kind in kinds for field in _FIELDS[kind] if _has(file.schema_arrow, kind, field)]
    if not columns:
        return
    for row in file.read(columns=columns).to_pylist():
        yield from ({kind: row[kind]} for kind in kinds if row.get(kind))


def _has(schema: pa.Schema, kind: str, field: str) -> bool:
    if kind not in schema.names:
        return False
    found = schema.field(kind).type
    for part in field.split("."):
        if not pa.types.is_struct(found) or found.get_field_index(part) < 0:
            return False
        found = found.field(part).type
    return True
