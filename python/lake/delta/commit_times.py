"""When the commits of a Delta table were made, as Delta's time travel and change data feed have it."""

from __future__ import annotations

from headrace.lake.delta.log import DeltaLog

_ENABLED = "delta.enableInCommitTimestamps"


def commit_times(log: DeltaLog, first: int = 0) -> dict[int, int]:
    """By version from `first` on that is still in the log: milliseconds since the epoch, ascending.

    A commit says so itself where the table has in-commit timestamps; else its file's time does, and where that is not
    after the commit's before it, one millisecond later than that one.
    """
    newest = log.version
    metadata = None if newest is None else log.metadata(newest)
    inside = str(((metadata or {}).get("configuration") or {}).get(_ENABLED)).lower() == "true"
    found: dict[int, int] = {}
    last: int | None = None
    for version, written_ns in sorted(log.commit_files().items()):
        if version < first:
            continue
        said = _said(log, version) if inside else None
        time = written_ns // 1_000_000 if said is None else said
        found[version] = last = time if last is None else max(time, last + 1)
    return found


def newest_until(times: dict[int, int], until_ms: int) -> int | None:
    """The newest version that was committed before or at a time; None: there is none."""
    return max((version for version, time in times.items() if time <= until_ms), default=None)


def _said(log: DeltaLog, version: int) -> int | None:
    """The timestamp in a commit: by the protocol its first action has it."""
    action = next(log.actions(version), {})
    said = (action.get("commitInfo") or {}).get("inCommitTimestamp")
    return None if said is None else int(said)
