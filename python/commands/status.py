"""`headrace status`: what is done, what is stale, what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rich.table import Table
from rich.text import Text

from headrace.commands.screen import out, table
from headrace.commands.summary import main_counts, manifests_of
from headrace.config import Spec, load_spec, parse_ds
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.monitor import facts
from headrace.stage import Stage, check_stage, identity
from headrace.stages import ORDER, STAGES
from headrace.storage import Location
from headrace.workspace import Workspace, pipeline_file

_STYLES = {"done": "green", "stale": "yellow", "missing": "dim"}


def status(
    ws: Workspace, pipeline: str | None, ds: str | None, last: int, verify: bool, overrides: Sequence[str] = ()
) -> None:
    """Print a table of the newest `last` days of one pipeline, or of all that have run.

    done: a run now would do nothing. stale: it would work again (its inputs, its part of the spec or, with `verify`,
    its output have changed). missing: it has not finished.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged, nothing has run.
    """
    spec = load_spec(pipeline, overrides) if pipeline else None
    names = [spec.pipeline] if spec else ws.pipelines()
    shown = table("pipeline", "ds", "stage", "state", ">rows", ">seconds", "finished, UTC")
    busy: list[str] = []
    for name in names:
        days = ws.days(name)
        days = [parse_ds(ds)] if ds else days[-last:] if last else days
        busy += _at_work(ws.lock(name), name)
        known = spec or _shipped(name, overrides)
        for day in days:
            _add_day(shown, ws, name, known, day, verify)
    if not shown.row_count:
        where = f" of pipeline '{names[0]}'" if pipeline else ""
        raise UserError(f"nothing{where} has run in {ws.home}. Run: headrace run {pipeline or 'PIPELINE'} --ds DATE")
    out.print(shown)
    for line in busy:
        out.print(line, markup=False)


def _shipped(name: str, overrides: Sequence[str]) -> Spec | None:
    """The spec of a shipped pipeline; None for one that came from a file of the user's, whose place is not known."""
    return load_spec(name, overrides) if pipeline_file(name).is_file() else None


def _add_day(shown: Table, ws: Workspace, name: str, spec: Spec | None, ds: str, verify: bool) -> None:
    manifests = manifests_of(ws, name, ds)
    for stage_name in ORDER:
        manifest = manifests.get(stage_name)
        state, reason = _state(ws, spec, ds, stage_name, manifests, verify)
        if state is None:
            continue
        cell = Text(state, style=_STYLES[state])
        if reason:
            cell.append(f": {reason}", style="dim")
        seconds, ended = "–", "–"
        if manifest is not None:
            seconds = f"{manifest.seconds:,.1f}"
            ended = facts.when(manifest.started + timedelta(seconds=manifest.seconds))
        shown.add_row(name, ds, stage_name, cell, main_counts(manifest), seconds, ended)
    shown.add_section()


def _state(
    ws: Workspace, spec: Spec | None, ds: str, name: str, manifests: dict[str, Manifest], verify: bool
) -> tuple[str | None, str]:
    """(state, reason); state None: the pipeline has no such stage."""
    manifest = manifests.get(name)
    if spec is None:
        # No spec to compare with: whether what it read is still what is there can be told from manifests alone.
        if manifest is None:
            return "missing", ""
        for read in manifest.inputs:
            upstream = manifests.get(read.name) if read.kind == "stage" else None
            if read.kind == "stage" and (upstream is None or identity(upstream) != read.version):
                return "stale", f"{read.name} has been run again"
        return "done", ""
    from headrace.jobs.stages import load_stage

    if not STAGES[name].applies(spec):
        return None, ""
    stage: Stage = load_stage(name)
    if manifest is None:
        return "missing", ""
    try:
        reason = check_stage(stage, spec, ws, ds, verify)
    except UserError as e:
        # An input is gone: what was made from it still stands, but could not be made again.
        return "stale", str(e).split(". Run:")[0]
    return ("done", "") if reason is None else ("stale", reason)


def _at_work(lock: Location, pipeline: str) -> list[str]:
    """A line where a run of the pipeline is going on."""
    holder = lock.holder()
    return [f"{pipeline}: a stage is at work ({holder})"] if holder else []
