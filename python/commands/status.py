"""`headrace status`: what is done, what is stale, what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

from rich.table import Table

from headrace.commands.screen import out, plain, print_json, table
from headrace.commands.summary import main_counts, manifests_of
from headrace.commands.verdict import broken_rules, of_challenger
from headrace.config import Spec, load_spec, parse_ds
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.stage import Stage, check_stage, identity
from headrace.stages import ORDER, STAGES
from headrace.workspace import Workspace, pipeline_file

_STYLES = {"done": "green", "stale": "yellow", "removed": "cyan", "missing": "dim"}


@dataclass(frozen=True)
class StageState:
    """State of one stage of a day."""

    pipeline: str
    ds: str
    stage: str
    #: done, stale, removed or missing, as `status` says.
    state: str
    #: Why it is stale, or what was removed when.
    reason: str
    manifest: Manifest | None

    def as_json(self) -> dict[str, Any]:
        m = self.manifest
        return {
            "pipeline": self.pipeline,
            "ds": self.ds,
            "stage": self.stage,
            "state": self.state,
            "reason": self.reason or None,
            **({"verdict": m.facts.get("verdict")} if m and self.stage == "gate" else {}),
            **({"saved": m.facts["saved"]} if m and m.facts.get("saved") else {}),
            "key": m.key if m else None,
            "rows": dict(m.rows) if m else {},
            "started": m.started.isoformat() if m else None,
            "seconds": m.seconds if m else None,
            "peak_memory_mib": dict(m.peak_memory_mib) if m else {},
        }


def status(
    ws: Workspace,
    pipeline: str | None,
    ds: str | None,
    last: int,
    verify: bool,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Print a table of the newest `last` days of one pipeline, or of all that have run.

    done: a run now would do nothing. stale: it would work again (its inputs, its part of the spec or, with `verify`,
    its output have changed). removed: it was done, and its output has gone by retention; a run makes it again.
    missing: it has not finished.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged, nothing has run.
    """
    states, busy = look(ws, pipeline, ds, last, verify, overrides)
    if not states:
        if pipeline is None:
            raise UserError(f"nothing has run in {ws.home}. Run: headrace run PIPELINE --ds DATE")
        spec = load_spec(pipeline, overrides)
        raise UserError(
            f"nothing of pipeline '{spec.pipeline}' has run in {ws.home}. Run: headrace run {spec.argument} --ds DATE"
        )
    if as_json:
        at_work = [{"pipeline": name, "holder": who} for name, who in busy.items()]
        print_json({"home": str(ws.home), "stages": [s.as_json() for s in states], "at_work": at_work})
        return
    out.print(state_table(states))
    for name, who in busy.items():
        out.print(f"{name}: a stage is at work ({who})", markup=False)


def look(
    ws: Workspace, pipeline: str | None, ds: str | None, last: int, verify: bool, overrides: Sequence[str] = ()
) -> tuple[list[StageState], dict[str, str]]:
    """Return the states of stages for the days of `status`, and the lease holders by pipeline.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged.
    """
    spec = load_spec(pipeline, overrides) if pipeline else None
    ws = ws if spec is None else ws.of(spec)
    names = [spec.pipeline] if spec else ws.pipelines()
    states: list[StageState] = []
    busy: dict[str, str] = {}
    for name in names:
        days = ws.days(name)
        days = [parse_ds(ds)] if ds else days[-last:] if last else days
        holders = dict.fromkeys(str(found) for lock in ws.locks(name) if (found := lock.holder()) is not None)
        if holders:
            busy[name] = "; ".join(holders)
        known = spec or _shipped(name, overrides)
        for day in days:
            states += _day(ws, name, known, day, verify)
    return states, busy


def _shipped(name: str, overrides: Sequence[str]) -> Spec | None:
    """Return the spec of a shipped pipeline; None for one from a user's file, whose place is not known."""
    return load_spec(name, overrides) if pipeline_file(name).is_file() else None


def _day(ws: Workspace, name: str, spec: Spec | None, ds: str, verify: bool) -> list[StageState]:
    """Return the states of the pipeline's stages, in order."""
    manifests = manifests_of(ws, name, ds)
    found = []
    for stage_name in ORDER:
        state, reason = _state(ws, spec, ds, stage_name, manifests, verify)
        if state is not None:
            found.append(StageState(name, ds, stage_name, state, reason, manifests.get(stage_name)))
    return found


def state_table(states: Sequence[StageState]) -> Table:
    """Return a table with a row for each state."""
    rows_table = table("pipeline", "ds", "stage", "state", ">rows", ">seconds", "finished, UTC")
    for _, day in groupby(states, key=lambda s: (s.pipeline, s.ds)):
        for s in day:
            cell = plain(s.state, style=_STYLES[s.state])
            if s.stage == "gate" and s.manifest is not None:
                verdict = str(s.manifest.facts.get("verdict"))
                cell.append(f", {verdict}", style="red" if verdict == "refused" else "")
                beside = of_challenger(s.manifest)
                told = [*broken_rules(s.manifest), *([beside] if beside else [])]
                cell.append("".join(f"; {text}" for text in told), style="dim")
            if s.manifest is not None and (saved := facts.saved_rows(s.manifest.facts.get("saved"))):
                cell.append(f"; embeddings: {saved}", style="dim")
            if s.reason:
                cell.append(f": {s.reason}", style="dim")
            seconds, ended = "–", "–"
            if s.manifest is not None:
                seconds = f"{s.manifest.seconds:,.1f}"
                ended = facts.when(s.manifest.started + timedelta(seconds=s.manifest.seconds))
            rows_table.add_row(s.pipeline, s.ds, s.stage, cell, main_counts(s.manifest), seconds, ended)
        rows_table.add_section()
    return rows_table


def _state(
    ws: Workspace, spec: Spec | None, ds: str, name: str, manifests: dict[str, Manifest], verify: bool
) -> tuple[str | None, str]:
    """(state, reason); state None: the pipeline has no such stage."""
    manifest = manifests.get(name)
    if manifest is not None and manifest.removed and (spec is None or STAGES[name].applies(spec)):
        return "removed", manifest.why_removed or ""
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
