"""Files of a Delta table's log: commits, checkpoints, what a power cut leaves of them, the record of replaced files.

headrace has data files on the disk before the commit that names them, and a commit before anything rests on it. Spark
syncs nothing: a cut right after its commit may leave the commit's file, or a checkpoint, empty, short or full of zeros.
No manifest names such a commit, so readers of headrace's own tables take the log as if it ended before it
(`torn_commits`), and the next writer moves it out of the way (`set_torn_aside`). A damaged commit with whole ones after
it is refused by whoever reads it: what came later rests on it.

Data files that were written again without some rows are in a record beside the log (`_headrace_erased.json`). Versions
of a table name files, and a file with rows that must go has to go itself: DeltaLog gives the new file where a version
names the old one. So manifests, which pin versions, stand. Another reader of an older version finds its files gone, as
after a VACUUM.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError, known_keys
from headrace.storage import LeaseLost, Location, local, location_of

_LOG = logging.getLogger("headrace.lake")
COMMIT = re.compile(r"(\d{20})\.json")
_OF_VERSION = re.compile(r"(\d{20})\.(?:json|crc|compacted\.json|checkpoint\..*)")
#: Suffix of damaged files that were set aside.
DAMAGED = ".damaged"
LAST_CHECKPOINT = "_last_checkpoint"
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
    (log / LAST_CHECKPOINT).remove()
    (log / f".{LAST_CHECKPOINT}.crc").remove()


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


def versions_listed(log: Location, first: int = 0) -> set[int]:
    """Return the versions from `first` on whose commits are in the log in this folder, torn ones among them."""
    names = log.names(after=f"{first:020d}" if first else "")
    return {int(m.group(1)) for name in names if (m := COMMIT.fullmatch(name))}


def last_checkpoint(log: Location) -> int | None:
    """Return the checkpoint at which readers begin to list the log, by `_last_checkpoint`; None where nothing says.

    It may be gone, and newer ones may be there.
    """
    try:
        return int(json.loads((log / LAST_CHECKPOINT).read_text())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def complete_checkpoints(log: Location, first: int = 0) -> list[Checkpoint]:
    """Return all complete checkpoints from version `first` on of the log in this folder, oldest first."""
    # By (version, number of parts; 0: a checkpoint in one file).
    files_of: dict[tuple[int, int], list[Location]] = {}
    for name in log.names(after=f"{first:020d}" if first else ""):
        match = _CHECKPOINT_NAME.fullmatch(name)
        if match is not None:
            files_of.setdefault((int(match.group(1)), int(match.group(3) or 0)), []).append(log / name)
    # Single-file checkpoints of one version are alternatives, each of them complete.
    return [
        Checkpoint(version, tuple(files) if parts else (files[0],))
        for (version, parts), files in sorted(files_of.items(), key=lambda item: item[0])
        if not parts or len(files) == parts
    ]


def newest_checkpoint(log: Location, at_most: int) -> Checkpoint | None:
    """Return the newest complete, readable checkpoint of a version up to `at_most`, of the log in this folder."""
    last = last_checkpoint(log)
    for first in (0,) if last is None or last > at_most else (last, 0):
        candidates = (c for c in reversed(complete_checkpoints(log, first)) if c.version <= at_most)
        if newest := next((c for c in candidates if all(map(whole_checkpoint, c.files))), None):
            return newest
    return None


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
    table = file.read(columns=columns)
    for kind in table.column_names:
        # A row has one action: the others are null, and of most kinds nearly all are.
        yield from ({kind: action} for action in table.column(kind).drop_null().to_pylist())


def _has(schema: pa.Schema, kind: str, field: str) -> bool:
    if kind not in schema.names:
        return False
    type_ = schema.field(kind).type
    for part in field.split("."):
        if not pa.types.is_struct(type_) or type_.get_field_index(part) < 0:
            return False
        type_ = type_.field(part).type
    return True


#: Key of userMetadata: a commit has removed days before `first` (headrace.lake.delta.retention).
RETENTION_MARK = "headrace.retention"
_ERASURE = "headrace.erasure"
#: Key in an `add` action: rows of the replaced file that were erased.
ROWS = "headrace.erased"


@dataclass(frozen=True)
class Replacement:
    """A data file that took the place of another one."""

    #: The `add` action of the new file, which may be without rows.
    add: dict[str, Any]
    #: Number of erased rows.
    rows: int


def replacements(table: Location) -> dict[str, Replacement]:
    """Return the replacement of each file that was written again, by its path in the log.

    Raises:
        UserError: the record is damaged, or of a newer release.
    """
    try:
        text = _record_of(table).read_text()
    except FileNotFoundError:
        return {}
    try:
        return {
            path: Replacement(**known_keys(replacement, ("add", "rows"), str(_record_of(table))))
            for path, replacement in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(
            f"{_record_of(table)} is damaged: older versions of the table cannot be read. Remove it to read the newest "
            f"version alone"
        ) from e


def save_replacements(table: Location, record: Mapping[str, Replacement], previous: Mapping[str, Replacement]) -> None:
    """Replace the record in one step, on the condition that it is the one that was read before.

    Raises:
        LeaseLost: another process has written it since.
    """
    file = _record_of(table)
    tagged = file.read_tagged()
    if replacements(table) != previous or not file.put_if(
        _record_text(record).encode(), None if tagged is None else tagged[1]
    ):
        raise LeaseLost(f"{file} was written by another run since this one read it; run again")


def _record_text(record: Mapping[str, Replacement]) -> str:
    return json.dumps({path: asdict(replacement) for path, replacement in record.items()}) + "\n"


def replaced(add: Mapping[str, Any], record: Mapping[str, Replacement]) -> Mapping[str, Any]:
    """Return the `add` action in force for that of a version."""
    replacement = record.get(add["path"])
    # An action with a deletion vector has other rows of the file than the replacement.
    return add if replacement is None or add.get("deletionVector") else {**replacement.add, ROWS: replacement.rows}


def erasure_text(request: str, rows: Mapping[str, int]) -> str:
    """Return the userMetadata of the commit by which rows of a request go; `rows`: how many, by partition `ds`."""
    return json.dumps({_ERASURE: {"request": request, "rows": dict(rows)}})


def erased_rows(user_metadata: str | None) -> Mapping[str, int] | None:
    """Return the rows that a commit of `erase` has removed, by day; None of another commit.

    Raises:
        UserError: a newer release has made it.
    """
    content = said_by(_ERASURE, user_metadata)
    if content is None:
        return None
    shown_record = f"the record of the erasure {content.get('request')} in a table's log"
    return dict(known_keys(content, ("request", "rows"), shown_record)["rows"])


def _record_of(table: Location) -> Location:
    return table / "_delta_log" / "_headrace_erased.json"


def first_kept(user_metadata: str | None) -> str | None:
    """Return the first day that a commit of retention (`remove_days_before`) has left; None of another commit.

    Raises:
        UserError: a newer release has made it.
    """
    content = said_by(RETENTION_MARK, user_metadata)
    if content is None:
        return None
    return str(known_keys(content, ("first",), "the record of days that were removed in a table's log")["first"])


def said_by(mark: str, user_metadata: str | None) -> Mapping[str, Any] | None:
    """Return what a commit's userMetadata holds below `mark`, None of another commit."""
    if user_metadata is None or mark not in user_metadata:
        return None
    try:
        stored = json.loads(user_metadata)
    except ValueError:
        return None
    return stored.get(mark) if isinstance(stored, dict) else None
