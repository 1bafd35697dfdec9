"""An Iceberg table's metadata files: JSON, a new one for each version of the table, none of which ever changes.

A table that only has a path keeps the number of the newest in `version-hint.text` (Iceberg's HadoopTables and hadoop
catalogs). Of any other table the catalog alone knows the newest: a failed commit leaves a file, too.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.errors import UserError
from headrace.storage import Location, StoreAway, local, location_named

#: Of the specification, whose tables are read.
FORMAT_VERSIONS = (1, 2, 3)
_HINT = "version-hint.text"
_NUMBERED = re.compile(r"v(\d+)(\.gz)?\.metadata\.json(\.gz)?")
_ANY = re.compile(r"(v?)(\d+)[^/]*\.metadata\.json(\.gz)?")


@dataclass(frozen=True)
class TableMetadata:
    """One metadata file."""

    file: Location
    content: Mapping[str, Any]

    @property
    def location(self) -> str:
        """The table's folder, as a path or URI."""
        return str(self.content["location"])

    @property
    def current(self) -> int | None:
        """Id of the newest snapshot of the main branch; None of a table that nobody has written to."""
        found = self.content.get("current-snapshot-id")
        return None if found in (None, -1) else int(found)

    @cached_property
    def snapshots(self) -> Mapping[int, Mapping[str, Any]]:
        """Those that are not expired, by id."""
        return {int(s["snapshot-id"]): s for s in self.content.get("snapshots") or ()}

    def as_of(self, milliseconds: float) -> int | None:
        """Id of what was the newest snapshot at a time since 1970, UTC; None: it is not known any more, or was none."""
        log = self.content.get("snapshot-log") or ()
        found = [int(e["snapshot-id"]) for e in log if e["timestamp-ms"] <= milliseconds]
        return found[-1] if found and found[-1] in self.snapshots else None

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """All that it knows of."""
        return list(self.content.get("schemas") or [self.content["schema"]])

    def schema(self, snapshot_id: int) -> Mapping[str, Any]:
        """The columns of a snapshot."""
        wanted = self.snapshots[snapshot_id].get("schema-id", self.content.get("current-schema-id", 0))
        return next((s for s in self.schemas if s.get("schema-id", 0) == wanted), self.schemas[-1])

    def partition_fields(self, spec_id: int) -> list[Mapping[str, Any]]:
        """The fields of one of its partition specs, in order."""
        specs = self.content.get("partition-specs")
        if specs is None:
            return list(self.content.get("partition-spec") or ())
        return list(next(s["fields"] for s in specs if s["spec-id"] == spec_id))

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties of the table."""
        return self.content.get("properties") or {}


def named_place(uri: str, what: str = "source") -> Location:
    """The place that a table's metadata, or a catalog, names: not encoded, and of a local file `file:/PATH`, too.

    Args:
        uri: of a file or folder.
        what: begins the message.

    Raises:
        UserError: it is in a store that is not known, or at a place that headrace's paths cannot name.
    """
    scheme, colon, path = uri.partition(":")
    if not colon or "/" in scheme:
        return local(uri)
    if scheme == "file":
        return local("/" + path.lstrip("/"))
    return location_named(uri, what).as_plain()


def read_metadata(file: Location) -> TableMetadata:
    """A metadata file.

    Raises:
        UserError: it is not there, is none, or of a version of Iceberg's format that is not known.
    """
    try:
        data = file.read_bytes()
        content = json.loads(gzip.decompress(data) if ".gz" in file.name else data)
        version = content["format-version"]
    except FileNotFoundError:
        raise UserError(f"source: there is no metadata file {file}") from None
    except StoreAway:  # nothing is known of the file
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
    """The newest version of a table that only has a path.

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
    # Its writers write the hint last, and may die before.
    while version + 1 in files:
        version += 1
    return read_metadata(files[version])


def metadata_with(folder: Location, snapshot_id: int) -> TableMetadata | None:
    """A metadata file that knows a snapshot, newest first; None: the snapshot was never there, or has expired.

    Which one does not matter: a snapshot is the same in all.
    """
    named = [(m, f) for f in folder.entries() if (m := _ANY.fullmatch(f.name))]
    for _, file in sorted(named, key=lambda found: int(found[0][2]), reverse=True):
        found = read_metadata(file)
        if snapshot_id in found.snapshots:
            return found
    return None


def primitives(type_: Any) -> set[str]:
    """The names of all types within a schema or type, at any depth."""
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
