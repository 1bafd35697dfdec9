"""Files of a Delta table's log, commits and checkpoints, and what a power cut leaves of them.

headrace has data files on the disk before the commit that names them, and a commit before anything rests on it. Spark
syncs nothing: a cut right after its commit may leave the commit's file, or a checkpoint, empty, short or full of zeros.
No manifest names such a commit, so readers of headrace's own tables take the log as if it ended before it
(`torn_commits`), and the next writer moves it out of the way (`set_torn_aside`). A damaged commit with whole ones after
it is refused by whoever reads it: what came later rests on it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.storage import Location, local, location_of

_LOG = logging.getLogger("headrace.lake")
COMMIT = re.compile(r"(\d{20})\.json")
_OF_VERSION = re.compile(r"(\d{20})\.(?:json|crc|compacted\.json|checkpoint\..*)")
#: Suffix of damaged files that were set aside.
DAMAGED = ".damaged"
_LAST_CHECKPOINT = "_last_checkpoint"
_PARQUET = b"PAR1"
#: Bytes of the smallest Parquet file: both magic numbers, and the length of the footer.
_LEAST_PARQUET = 12
_CHECKPOINT_NAME = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-fA-F-]{36})?\.(parquet|json)")
_SIDECARS = "_sidecars"
#: Fields to read of each action, where a file has them. Statistics may be text, a struct, or both.
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


def commit_file(log: Location, version: int) -> Location:
    """Return the file of a commit; `log`: the folder `_delta_log`."""
    return log / f"{version:020d}.json"


def torn_commits(log: Location, versions: Collection[int]) -> set[int]:
    """Return the versions at the end of the log of one of headrace's tables whose commits are not whole.

    None in a store of objects, where a commit is there whole or not at all, and of tables of others.

    Args:
        log: the folder `_delta_log`.
        versions: those whose commits are in it.
    """
    torn = set[int]()
    if log.scheme != "file" or log.plain:
        return torn
    for version in sorted(versions, reverse=True):
        if _is_whole(commit_file(log, version), _commit_whole):
            break
        torn.add(version)
    return torn


def whole_checkpoint(file: Location) -> bool:
    """Return whether a checkpoint's file can be one: not where a power cut has left it empty, short or zeros."""
    return file.scheme != "file" or _is_whole(file, _checkpoint_whole)


def set_torn_aside(folder: Location) -> None:
    """Move commits and checkpoints that are not whole out of the way of the next commit. Its writer holds the lease.

    Raises:
        UserError: what is left of the log tells of no state of the table.
    """
    log = folder / "_delta_log"
    if log.scheme != "file":
        return
    names = [file.name for file in log.entries()]
    versions = {int(m.group(1)) for name in names if (m := COMMIT.fullmatch(name))}
    torn = torn_commits(log, versions)
    # Includes leftovers of a commit that is missing, such as its checksum, which would not fit the next commit.
    newest = max(versions - torn, default=-1) if versions else None
    of_torn = {
        name for name in names if (m := _OF_VERSION.fullmatch(name)) and newest is not None and int(m.group(1)) > newest
    }
    checkpoints = {name for name in names if ".checkpoint." in name and not whole_checkpoint(log / name)}
    if not (of_torn | checkpoints):
        return
    if torn and torn == versions and 0 not in torn:
        first = commit_file(log, min(torn))
        raise UserError(
            f"{first} is damaged ({first.size():,} bytes), and nothing before it is in the log of {folder}: put the "
            f"log back from a backup, or move the table away to load it again"
        )
    for name in sorted(of_torn | checkpoints):
        file = log / name
        _LOG.warning("%s is not whole (%s bytes), as after a power cut: set aside", file, f"{file.size():,}")
        file.move_to(log / f"{name}{DAMAGED}")
        (log / f".{name}.crc").remove()
    # It may name a missing checkpoint; without it readers list the log.
    (log / _LAST_CHECKPOINT).remove()
    (log / f".{_LAST_CHECKPOINT}.crc").remove()


def read_commit(file: Location) -> list[dict[str, Any]]:
    """Return the actions of a commit, in their order.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is damaged; names the file and its bytes.
    """
    data = file.read_bytes()
    try:
        actions = [json.loads(line) for line in data.splitlines() if line.strip()]
    except ValueError:
        actions = []
    if not actions or not all(isinstance(action, dict) for action in actions):
        raise UserError(
            f"{file} is damaged: its {len(data):,} bytes are no commit of a Delta table. Put it back from a backup, or "
            f"RESTORE or load the table again from what it was made of"
        )
    return actions


def _is_whole(file: Location, check: Callable[[Location], bool]) -> bool:
    """Files of a log never change: each is looked at once."""
    try:
        info = file.info()
    except FileNotFoundError:  # another process has set it aside
        return False
    return _looked_at(file, info.size, info.modified_ns, check)


@lru_cache(maxsize=1024)
def _looked_at(file: Location, size: int, modified_ns: int, check: Callable[[Location], bool]) -> bool:
    return check(file)


def _commit_whole(file: Location) -> bool:
    try:
        read_commit(file)
    except UserError:
        return False
    return True


def _checkpoint_whole(file: Location) -> bool:
    if file.suffix != ".parquet":
        return _commit_whole(file)
    with file.open() as stream:
        first = stream.read(len(_PARQUET))
        if stream.seek(0, 2) < _LEAST_PARQUET:
            return False
        stream.seek(-len(_PARQUET), 2)
        return first == _PARQUET == stream.read()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    version: int
    files: tuple[Location, ...]

    def actions(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Yield the actions of some kinds (`add`, `metaData`, `protocol`, `txn`), each as {kind: fields}."""
        for file in self.files:
            for action in _checkpoint_actions(file, (*kinds, "sidecar")):
                sidecar = action.get("sidecar")
                if sidecar is None:
                    yield action
                elif "add" in kinds:
                    yield from _checkpoint_actions(_sidecar(file.parent, sidecar["path"]), ("add",))


def complete_checkpoints(log: Location) -> list[Checkpoint]:
    """Return all complete checkpoints of the log in this folder, oldest first."""
    # By (version, number of parts; 0: a checkpoint in one file).
    files_of: dict[tuple[int, int], list[Location]] = {}
    for path in log.entries():
        match = _CHECKPOINT_NAME.fullmatch(path.name)
        if match is not None:
            files_of.setdefault((int(match.group(1)), int(match.group(3) or 0)), []).append(path)
    # Single-file checkpoints of one version are alternatives, each of them complete.
    return [
        Checkpoint(version, tuple(files) if parts else (files[0],))
        for (version, parts), files in sorted(files_of.items(), key=lambda item: item[0])
        if not parts or len(files) == parts
    ]


def newest_checkpoint(log: Location, at_most: int) -> Checkpoint | None:
    """Return the newest complete, readable checkpoint of a version up to `at_most`, of the log in this folder."""
    candidates = (c for c in reversed(complete_checkpoints(log)) if c.version <= at_most)
    return next((c for c in candidates if all(map(whole_checkpoint, c.files))), None)


def _sidecar(log: Location, path: str) -> Location:
    name = unquote(path)
    if "/" not in name:
        return log / _SIDECARS / name
    return location_of(name) if ":/" in name else local(name)


def _checkpoint_actions(path: Location, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
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
    type_ = schema.field(kind).type
    for part in field.split("."):
        if not pa.types.is_struct(type_) or type_.get_field_index(part) < 0:
            return False
        type_ = type_.field(part).type
    return True
