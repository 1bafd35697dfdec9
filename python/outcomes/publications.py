"""When the lists of a day were published, time and again, and which of them were there while they were shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from headrace.generate.site import site_path
from headrace.lake.delta.erased import erased_rows
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Output
from headrace.stage import Context
from headrace.workspace import Workspace


@dataclass(frozen=True)
class Publication:
    """A version of a day's lists."""

    #: When it was there, milliseconds since 1970.
    at: int
    table: Output


@dataclass(frozen=True)
class Window:
    """When the lists of a day were shown: milliseconds since 1970, the end outside."""

    start: int
    end: int


def publications(ws: Workspace, name: str) -> dict[str, list[Publication]]:
    """By day, the versions of a table that brought rows of it, as far back as its log goes; oldest first.

    Args:
        ws: the workspace.
        name: of the table, as manifests have it.
    """
    log = DeltaLog(ws.locate(name))
    found: dict[str, list[Publication]] = {}
    for commit in log.commits():
        if erased_rows(commit.user_metadata) is not None:
            continue  # the versions before are read without these rows
        rows: dict[str, int] = {}
        for add in commit.adds:
            ds = (add.partition or {}).get("ds")
            # A run says which it is; what deletes or rewrites rows of others does not.
            if ds is not None and add.data_change and commit.user_metadata is not None:
                rows[ds] = rows.get(ds, 0) + (add.rows or 0)
        at = commit.timestamp if commit.timestamp is not None else log.committed_ns(commit.version) // 1_000_000
        for ds, count in rows.items():
            table = Output(kind="delta", name=name, version=str(commit.version), rows=count)
            found.setdefault(ds, []).insert(0, Publication(at, table))
    return found


def window(ctx: Context, ds: str) -> Window | None:
    """When the lists of a day are shown; None where that is not known, and any may have been.

    The days of a generated log are none of the calendar: there it is when the site was simulated for the days after.
    """
    outcomes = ctx.spec.outcomes
    assert outcomes is not None, "headrace.stages: no stage without the section"
    day = datetime.fromisoformat(ds).replace(tzinfo=UTC)
    if ctx.spec.generate is None:
        start = day + timedelta(days=1, hours=outcomes.starts_after_hours)
        return Window(_millis(start), _millis(start + timedelta(days=outcomes.live_days)))
    landing = ctx.ws.landing(ctx.spec.pipeline)
    after = [(day + timedelta(days=k)).date().isoformat() for k in range(1, outcomes.live_days + 1)]
    visited = [p.info().modified_ns // 1_000_000 for d in after if (p := site_path(landing, d)).is_file()]
    return Window(min(visited), max(visited)) if visited else None


def live(versions: Sequence[Publication], shown: Window | None) -> Publication | None:
    """Of a day's versions, oldest first, the one that was there the longest while lists were shown.

    Of a window without a length it is the newest before it. None: the first came when the window was over.
    """
    if shown is None:
        return versions[-1]
    in_time = [v for v in versions if v.at < shown.end]
    if not in_time:
        return None
    ends = [*(v.at for v in in_time[1:]), shown.end]
    there = [
        (max(0, end - max(version.at, shown.start)), number)
        for number, (version, end) in enumerate(zip(in_time, ends, strict=True))
    ]
    return in_time[max(there)[1]]


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
