"""The lists of earlier days: which version of which table has those of a day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from headrace.config import Outcomes, Spec
from headrace.errors import UserError
from headrace.manifest import Input, Manifest, Output
from headrace.stage import Context


@dataclass(frozen=True)
class ServedDay:
    """A day whose lists were shown from its end on."""

    ds: str
    table: Output

    @property
    def input(self) -> Input:
        """The lists, pinned."""
        return Input(kind=self.table.kind, name=self.table.name, version=self.table.version)


def served_days(ctx: Context) -> list[ServedDay]:
    """The days before ctx.ds that the stage looks at and whose lists are there, oldest first.

    Those that were published, or of a pipeline that publishes nothing those that were scored.
    """
    spec = ctx.spec
    stage = "score" if spec.publish is None else "publish"
    found = []
    for ds in days_looked_at(spec, ctx.ds):
        manifest = Manifest.load(ctx.ws.manifest(spec.pipeline, ds, stage))
        if manifest is not None and not manifest.removed:
            found.append(ServedDay(ds, manifest.output("delta")))
    return found


def days_looked_at(spec: Spec, ds: str) -> list[str]:
    """The days before ds with provisional labels, and `history_days` with ripe ones; oldest first."""
    last = date.fromisoformat(ds)
    return [(last - timedelta(days=k)).isoformat() for k in range(spec.served_days_read - 1, 0, -1)]


def pinned_days(ctx: Context) -> list[ServedDay]:
    """`served_days` of the run's inputs.

    Raises:
        UserError: a day's lists are others by now.
    """
    days = served_days(ctx)
    pinned: Sequence[Input] = ctx.inputs
    for day in days:
        if day.input not in pinned:
            raise UserError(f"the lists of {day.ds} have been made again in the meantime: run the stage outcomes again")
    return days


def section(spec: Spec) -> Outcomes:
    """The section, which a pipeline with the stage has."""
    assert spec.outcomes is not None, "headrace.stages: no stage without the section"
    return spec.outcomes
