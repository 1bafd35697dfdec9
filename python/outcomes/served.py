"""The lists of earlier days: which version of which table has those that users were shown."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from headrace.config import Outcomes, Spec
from headrace.errors import UserError
from headrace.manifest import Input, Manifest, Output
from headrace.outcomes.publications import Publication, live, publications, window
from headrace.score.day_table import verify_day
from headrace.stage import Context

log = logging.getLogger("headrace.outcomes")


@dataclass(frozen=True)
class ServedDay:
    """A day whose lists were shown from its end on."""

    ds: str
    table: Output

    @property
    def input(self) -> Input:
        """The lists, pinned."""
        return Input(kind=self.table.kind, name=self.table.name, version=self.table.version)


@dataclass(frozen=True)
class Served:
    """What was shown of the days that the stage looks at, oldest first."""

    days: list[ServedDay]
    #: Days whose lists were published when they could no longer be shown: nobody saw them.
    late: list[str]


def served_days(ctx: Context) -> Served:
    """The days before ctx.ds that the stage looks at and whose lists are there.

    Those that were published, or of a pipeline that publishes nothing those that were scored; of several versions of a
    day the one that was there while its lists were shown (headrace.outcomes.publications).
    """
    spec = ctx.spec
    stage = "score" if spec.publish is None else "publish"
    found = Served([], [])
    by_table: dict[str, dict[str, list[Publication]]] = {}
    for ds in days_looked_at(spec, ctx.ds):
        manifest = Manifest.load(ctx.ws.manifest(spec.pipeline, ds, stage))
        if manifest is None or manifest.removed:
            continue
        newest = manifest.output("delta")
        if newest.name not in by_table:
            by_table[newest.name] = publications(ctx.ws, newest.name)
        # A log that no longer says when the day was written has its manifest beside it.
        made = Publication(int((manifest.started.timestamp() + manifest.seconds) * 1000), newest)
        shown = live(by_table[newest.name].get(ds, [made]), window(ctx, ds))
        if shown is None:
            found.late.append(ds)
        elif shown.table != newest and (reason := verify_day(ctx.ws, shown.table, ds)):
            log.warning("outcomes: the lists of %s that were shown are gone: %s", ds, reason)
        else:
            found.days.append(ServedDay(ds, shown.table))
    return found


def days_looked_at(spec: Spec, ds: str) -> list[str]:
    """The days before ds with provisional labels, and `history_days` with ripe ones; oldest first."""
    last = date.fromisoformat(ds)
    return [(last - timedelta(days=k)).isoformat() for k in range(spec.served_days_read - 1, 0, -1)]


def pinned_days(ctx: Context) -> Served:
    """`served_days` of the run's inputs.

    Raises:
        UserError: a day's lists are others by now.
    """
    found = served_days(ctx)
    pinned: Sequence[Input] = ctx.inputs
    for day in found.days:
        if day.input not in pinned:
            raise UserError(f"the lists of {day.ds} have been made again in the meantime: run the stage outcomes again")
    return found


def section(spec: Spec) -> Outcomes:
    """The section, which a pipeline with the stage has."""
    assert spec.outcomes is not None, "headrace.stages: no stage without the section"
    return spec.outcomes
