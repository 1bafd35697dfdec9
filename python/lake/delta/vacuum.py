"""Data files of a Delta table that no version which is still to be read names.

Delta's own VACUUM knows ages alone; here the versions that somebody has pinned are kept whole, however old they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace.errors import UserError
from headrace.lake.delta.deletion_vectors import vector_file
from headrace.lake.delta.log import DeltaLog, file_path
from headrace.storage import Location

_LOG = "_delta_log"
#: Folders in which there are no data files.
_NOT_DATA = (_LOG,)


def unused_files(table: Location, pinned: Collection[int], first_day: str | None, before_ns: int) -> list[Location]:
    """The files that can go: those of no version below, written and removed before a moment.

    Args:
        table: its folder.
        pinned: versions whose files stay, besides the newest; those that the log no longer has are nobody's.
        first_day: of pinned versions only files of this day (partition `ds`) and later ones stay; None: all.
        before_ns: what was written, or removed by a commit, since then stays: nanoseconds since 1970.

    Raises:
        UserError: a table that headrace does not read, or one of whose files is elsewhere.
    """
    log = DeltaLog(table)
    newest = log.version
    if newest is None:
        return []
    log.check()
    # Files that are there now are looked for before the log is read: what is committed meanwhile is not among them.
    there = [f for f in table.files() if f.below(table).split("/", 1)[0] not in _NOT_DATA]
    used: set[Location] = set()
    for version in {newest, *pinned}:
        state = log.state(version)
        if state is None:
            if version == newest:
                raise UserError(f"{table}: the log of this Delta table is not whole, so nothing of it is removed")
            continue
        for add in state.adds:
            ds = dict(add["partitionValues"] or {}).get("ds")
            if version == newest or first_day is None or ds is None or ds >= first_day:
                used |= _files(table, add)
    for version in sorted(log.versions(), reverse=True):
        if log.committed_ns(version) < before_ns:
            break
        for action in log.actions(version):
            for kind in ("add", "remove", "cdc"):
                if kind in action:
                    used |= _files(table, action[kind])
    return [f for f in there if f not in used and f.info().modified_ns < before_ns]


def unnamed_files(table: Location, files: Collection[Location]) -> list[Location]:
    """Those of some files that no commit of the log names: of writers that were killed, or that stand still."""
    log, named = DeltaLog(table), set[Location]()
    for version in log.versions():
        for action in log.actions(version):
            for kind in ("add", "remove", "cdc"):
                if kind in action:
                    named |= _files(table, action[kind])
    return [file for file in files if file not in named]


def _files(table: Location, action: Mapping[str, object]) -> set[Location]:
    """The file of an action, and its deletion vector's."""
    found = {file_path(table, str(action["path"]))}
    vector = action.get("deletionVector")
    if isinstance(vector, Mapping) and vector.get("storageType") in ("u", "p"):
        named = str(vector["pathOrInlineDv"])
        found.add(table / vector_file(named) if vector["storageType"] == "u" else file_path(table, named))
    return found
