"""What a power cut leaves at the end of a table's log, and how the table goes on from the state before it.

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
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

from headrace.errors import UserError
from headrace.storage import Location

_LOG = logging.getLogger("headrace.lake")

COMMIT = re.compile(r"(\d{20})\.json")
_OF_VERSION = re.compile(r"(\d{20})\.(?:json|crc|compacted\.json|checkpoint\..*)")
#: Ends the name of what was set aside.
DAMAGED = ".damaged"
_LAST_CHECKPOINT = "_last_checkpoint"
_PARQUET = b"PAR1"
#: Of a Parquet file without rows: both magic numbers, and the length of the footer.
_LEAST_PARQUET = 12


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
    found = set[int]()
    if log.scheme != "file" or log.plain:
        return found
    for version in sorted(versions, reverse=True):
        if _is_whole(commit_file(log, version), _commit_whole):
            break
        found.add(version)
    return found


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
    # Also what a commit that is not there at all has left, such as its checksum, which the next one would not fit.
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
    # It may name a checkpoint that is gone; without it readers list the log.
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
        found = [json.loads(line) for line in data.splitlines() if line.strip()]
    except ValueError:
        found = []
    if not found or not all(isinstance(action, dict) for action in found):
        raise UserError(
            f"{file} is damaged: its {len(data):,} bytes are no commit of a Delta table. Put it back from a backup, or "
            f"RESTORE or load the table again from what it was made of"
        )
    return found


def _is_whole(file: Location, check: Callable[[Location], bool]) -> bool:
    """Files of a log never change: each is looked at once."""
    try:
        info = file.info()
    except FileNotFoundError:  # set aside just now
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
