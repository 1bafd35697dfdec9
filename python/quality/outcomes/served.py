"""Lists of earlier days: which version of which table users were shown.

A day's lists may be published several times; the log of the table says when.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from headrace.config import Outcomes, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.day_table import verify_day
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_files import erased_rows
from headrace.lake.generate.site import site_path
from headrace.stage import Context
from headrace.stage.manifest import Input, Manifest, Output

log = logging.getLogger("headrace.outcomes")


@dataclass(frozen=True)
class ServedPublication:
    """Published version of a day's lists."""

    #: Milliseconds since 1970 (UTC).
    published_ms: int
    table: Output


@dataclass(frozen=True)
class Window:
    """Period in which the lists of a day were shown: milliseconds since 1970, the end excluded."""

    start: int
    end: int


def publications(ws: Workspace, name: str) -> dict[str, list[ServedPublication]]:
    """List by day the versions of a table that added rows of it, as far back as its log goes; oldest first.

    Args:
        ws: the workspace.
        name: the table's name in manifests.
    """
    log = DeltaLog(ws.locate(name))
    versions_by_day: dict[str, list[ServedPublication]] = {}
    for commit in log.commits():
        if erased_rows(commit.user_metadata) is not None:
            continue  # earlier versions are read without these rows
        rows: dict[str, int] = {}
        for add in commit.adds:
            ds = (add.partition or {}).get("ds")
            # Runs write user metadata; commands that delete or rewrite other rows do not.
            if ds is not None and add.data_change and commit.user_metadata is not None:
                rows[ds] = rows.get(ds, 0) + (add.rows or 0)
        published_ms = (
            commit.timestamp if commit.timestamp is not None else log.committed_ns(commit.version) // 1_000_000
        )
        for ds, count in rows.items():
            table = Output(kind="delta", name=name, version=str(commit.version), rows=count)
            versions_by_day.setdefault(ds, []).insert(0, ServedPublication(published_ms, table))
    return versions_by_day


def window(ctx: Context, ds: str) -> Window | None:
    """Return the period in which the lists of a day are shown; None where it is unknown.

    The days of a generated log are not calendar days: there the period is when the site was simulated for later days.
    """
    outcomes = ctx.spec.outcomes
    assert outcomes is not None, "headrace.config.stages: no stage without the section"
    day = datetime.fromisoformat(ds).replace(tzinfo=UTC)
    if ctx.spec.generate is None:
        start = day + timedelta(days=1, hours=outcomes.starts_after_hours)
        return Window(_millis(start), _millis(start + timedelta(days=outcomes.live_days)))
    landing = ctx.ws.landing(ctx.spec.pipeline)
    after = [(day + timedelta(days=k)).date().isoformat() for k in range(1, outcomes.live_days + 1)]
    visited = [p.info().modified_ns // 1_000_000 for d in after if (p := site_path(landing, d)).is_file()]
    return Window(min(visited), max(visited)) if visited else None


def live(versions: Sequence[ServedPublication], shown_window: Window | None) -> ServedPublication | None:
    """Return the version of a day (oldest first) that was current the longest while lists were shown.

    For a window without a length it is the newest version before it. None: the first version is later than the window.
    """
    if shown_window is None:
        return versions[-1]
    in_time = [v for v in versions if v.published_ms < shown_window.end]
    if not in_time:
        return None
    ends = [*(v.published_ms for v in in_time[1:]), shown_window.end]
    durations = [
        (max(0, end - max(version.published_ms, shown_window.start)), number)
        for number, (version, end) in enumerate(zip(in_time, ends, strict=True))
    ]
    return in_time[max(durations)[1]]


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


@dataclass(frozen=True)
class ServedDay:
    """Day whose lists were shown from its end on."""

    ds: str
    table: Output

    @property
    def input(self) -> Input:
        """Return the lists as a pinned input."""
        return Input(kind=self.table.kind, name=self.table.name, version=self.table.version)


@dataclass(frozen=True)
class Served:
    """Lists that were shown, of the days that the stage reads, oldest first."""

    days: list[ServedDay]
    #: Days whose lists were published too late to be shown: nobody saw them.
    late: list[str]


def served_days(ctx: Context) -> Served:
    """Find the lists of the days before ctx.ds that the stage reads.

    Published lists, or scored ones where a pipeline publishes nothing. Of several versions of a day it is the one that
    was current while its lists were shown (`live`).
    """
    spec = ctx.spec
    stage = "score" if spec.publish is None else "publish"
    served = Served([], [])
    by_table: dict[str, dict[str, list[ServedPublication]]] = {}
    for ds in days_looked_at(spec, ctx.ds):
        manifest = Manifest.load(ctx.ws.manifest(spec.pipeline, ds, stage))
        if manifest is None or manifest.removed:
            continue
        newest = manifest.output("delta")
        if newest.name not in by_table:
            by_table[newest.name] = publications(ctx.ws, newest.name)
        # The log may no longer say when the day was written; its manifest does.
        manifest_version = ServedPublication(int((manifest.started.timestamp() + manifest.seconds) * 1000), newest)
        shown_version = live(by_table[newest.name].get(ds, [manifest_version]), window(ctx, ds))
        if shown_version is None:
            served.late.append(ds)
        elif shown_version.table != newest and (reason := verify_day(ctx.ws, shown_version.table, ds)):
            log.warning("outcomes: the lists of %s that were shown are gone: %s", ds, reason)
        else:
            served.days.append(ServedDay(ds, shown_version.table))
    return served


def days_looked_at(spec: Spec, ds: str) -> list[str]:
    """List the days before ds with provisional labels, and `history_days` with ripe ones; oldest first."""
    last = date.fromisoformat(ds)
    return [(last - timedelta(days=k)).isoformat() for k in range(spec.served_days_read - 1, 0, -1)]


def pinned_days(ctx: Context) -> Served:
    """Return `served_days`, checked against the run's inputs.

    Raises:
        UserError: a day's lists have changed since the run began.
    """
    served = served_days(ctx)
    pinned: Sequence[Input] = ctx.inputs
    for day in served.days:
        if day.input not in pinned:
            raise UserError(f"the lists of {day.ds} have been made again in the meantime: run the stage outcomes again")
    return served


def section(spec: Spec) -> Outcomes:
    """Return the section, which every pipeline with the stage has."""
    assert spec.outcomes is not None, "headrace.config.stages: no stage without the section"
    return spec.outcomes


def sources(spec: Spec) -> list[str | None]:
    """List the sources whose events are read; None: the main one, which is always included."""
    return list(dict.fromkeys([None, *(label.from_ for label in section(spec).labels.values())]))
