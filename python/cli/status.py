"""`headrace status`, once or with `--watch`, and `headrace metrics`: states of stages, done, stale or missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from headrace.cli.root import VAR, Ds, Home, Json, MaybePipeline, Panel, Pipeline, Sets, app, examples, workspace
from headrace.cli.screen import out, plain, print_json, table
from headrace.cli.summary import broken_rules, main_counts, manifests_of, of_challenger
from headrace.config.installation import pipeline_file
from headrace.config.stages import ORDER, STAGES, in_order
from headrace.errors import UserError
from headrace.quality.report import facts

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.jobs.observe.application import RunningStage
    from headrace.stage import Stage
    from headrace.stage.manifest import Manifest


@app.command(
    rich_help_panel=Panel.A_DAY,
    epilog=examples(
        "headrace status",
        "headrace status clicks --last 7",
        "headrace status clicks --verify",
        "headrace status clicks --last 1 --watch",
        "headrace status --watch --every 30",
    ),
)
def status(
    pipeline: MaybePipeline = None,
    ds: Ds = None,
    last: Annotated[int, typer.Option(help="The newest N days; 0: all.", metavar="N", min=0)] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="Check the outputs, too, not only manifests.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C, with the progress of running stages.")
    ] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between two looks.", metavar="SECONDS", min=0.1)] = 2,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show which stages are done, stale or missing, with rows and times."""
    if watch:
        if as_json or verify:
            raise UserError("--watch goes with neither --json nor --verify")
        watch_status(workspace(home), pipeline, ds, last, every, sets or [])
        return
    show_status(workspace(home), pipeline, ds, last, verify, sets or [], as_json)


@app.command(
    rich_help_panel=Panel.OPERATE,
    epilog=examples("headrace metrics clicks", "headrace metrics clicks > headrace_clicks.prom"),
)
def metrics(pipeline: Pipeline, sets: Sets = None, home: Home = VAR) -> None:
    """Print a pipeline's metrics in Prometheus' text format (docs/observe.md)."""
    from headrace.config import load_spec
    from headrace.jobs.observe.prometheus import exposition, metrics_of

    spec = load_spec(pipeline, sets or [])
    out.print(exposition(metrics_of(workspace(home).of(spec), spec.pipeline)), markup=False, soft_wrap=True, end="")


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


def show_status(
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
    from headrace.config import load_spec

    states, busy = stage_states(ws, pipeline, ds, last, verify, overrides)
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


def stage_states(
    ws: Workspace, pipeline: str | None, ds: str | None, last: int, verify: bool, overrides: Sequence[str] = ()
) -> tuple[list[StageState], dict[str, str]]:
    """Return the states of stages for the days of `status`, and the lease holders by pipeline.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged.
    """
    from headrace.config import load_spec, parse_ds

    spec = load_spec(pipeline, overrides) if pipeline else None
    ws = ws if spec is None else ws.of(spec)
    names = [spec.pipeline] if spec else ws.pipelines()
    states: list[StageState] = []
    busy: dict[str, str] = {}
    for name in names:
        days = ws.days(name)
        days = [parse_ds(ds)] if ds else days[-last:] if last else days
        holders = dict.fromkeys(str(holder) for lock in ws.locks(name) if (holder := lock.holder()) is not None)
        if holders:
            busy[name] = "; ".join(holders)
        known = spec or _shipped(name, overrides)
        stages = _stages_of(ws, name, known)
        for day in days:
            states += _day(ws, name, known, day, verify, stages)
    return states, busy


def _shipped(name: str, overrides: Sequence[str]) -> Spec | None:
    """Return the spec of a shipped pipeline; None for one from a user's file, whose place is not known."""
    from headrace.config import load_spec

    return load_spec(name, overrides) if pipeline_file(name).is_file() else None


def _stages_of(ws: Workspace, name: str, spec: Spec | None) -> list[str]:
    """Return the stages that a pipeline has, in order, those of other packages among them.

    Of one whose file is not known: those that every pipeline has, and those that have finished on some day.
    """
    from headrace.stage import stage_entries

    if spec is not None:
        return list(stage_entries(spec))
    finished = ws.days_of_stages(name)
    return in_order([*finished, *(stage for stage in ORDER if STAGES[stage].section is None)])


def _day(ws: Workspace, name: str, spec: Spec | None, ds: str, verify: bool, stages: Sequence[str]) -> list[StageState]:
    """Return the states of the pipeline's stages, in order."""
    manifests = manifests_of(ws, name, ds, stages)
    states = []
    for stage in stages:
        state, reason = _stage_state(ws, spec, ds, stage, manifests, verify)
        states.append(StageState(name, ds, stage, state, reason, manifests.get(stage)))
    return states


def state_table(states: Sequence[StageState]) -> Table:
    """Return a table with a row for each state."""
    rows_table = table("pipeline", "ds", "stage", "state", ">rows", ">seconds", "finished, UTC")
    for _, day in groupby(states, key=lambda s: (s.pipeline, s.ds)):
        for s in day:
            cell = plain(s.state, style=_STYLES[s.state])
            if s.stage == "gate" and s.manifest is not None:
                verdict = str(s.manifest.facts.get("verdict"))
                cell.append(f", {verdict}", style="red" if verdict == "refused" else "")
                challenger = of_challenger(s.manifest)
                details = [*broken_rules(s.manifest), *([challenger] if challenger else [])]
                cell.append("".join(f"; {text}" for text in details), style="dim")
            if s.manifest is not None and (saved := facts.saved_rows(s.manifest.facts.get("saved"))):
                cell.append(f"; embeddings: {saved}", style="dim")
            if s.reason:
                cell.append(f": {s.reason}", style="dim")
            seconds, finished = "–", "–"
            if s.manifest is not None:
                seconds = f"{s.manifest.seconds:,.1f}"
                finished = facts.when(s.manifest.started + timedelta(seconds=s.manifest.seconds))
            rows_table.add_row(s.pipeline, s.ds, s.stage, cell, main_counts(s.manifest), seconds, finished)
        rows_table.add_section()
    return rows_table


def _stage_state(
    ws: Workspace, spec: Spec | None, ds: str, name: str, manifests: dict[str, Manifest], verify: bool
) -> tuple[str, str]:
    """Return the state of a stage that the pipeline has, and the reason."""
    from headrace.stage import check_stage, identity

    manifest = manifests.get(name)
    if manifest is not None and manifest.removed:
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

    stage: Stage = load_stage(name, spec)
    if manifest is None:
        return "missing", ""
    try:
        reason = check_stage(stage, spec, ws, ds, verify)
    except UserError as e:
        # An input is gone: what was made from it still stands, but could not be made again.
        return "stale", str(e).split(". Run:")[0]
    return ("done", "") if reason is None else ("stale", reason)


_BAR = 24


def watch_status(
    ws: Workspace, pipeline: str | None, ds: str | None, last: int, every: float, overrides: Sequence[str] = ()
) -> None:
    """Show the state every so many seconds until Ctrl-C: on a terminal in one place, elsewhere as lines for changes.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged.
    """
    from rich.live import Live

    printed: dict[str, str] = {}
    try:
        if not out.is_terminal:
            while True:
                for line in _news(ws, *stage_states(ws, pipeline, ds, last, False, overrides), printed):
                    out.print(line, markup=False, soft_wrap=True)
                time.sleep(every)
        with Live(console=out, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(_watch_screen(ws, *stage_states(ws, pipeline, ds, last, False, overrides)), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


def _watch_screen(ws: Workspace, states: Sequence[StageState], busy: dict[str, str]) -> RenderableType:
    from headrace.jobs.observe.application import RunningStage

    parts: list[RenderableType] = [state_table(states)] if states else [plain("nothing has run yet", style="dim")]
    for name in busy:
        parts += [plain(f"{name} {stage.ds} {describe(stage)}") for stage in RunningStage.read(ws, name)] or [
            plain(f"{name}: a stage is at work ({busy[name]})")
        ]
    return Group(*parts)


def _news(ws: Workspace, states: Sequence[StageState], busy: dict[str, str], printed: dict[str, str]) -> list[str]:
    """Return lines that were not printed yet: states that have changed, and the progress of running stages."""
    from headrace.jobs.observe.application import RunningStage

    now = {f"{s.pipeline} {s.ds} {s.stage}": s.state + (f": {s.reason}" if s.reason else "") for s in states}
    for name in busy:
        for stage in RunningStage.read(ws, name):
            now[f"{name} {stage.ds} {stage.stage} at work"] = describe(stage)
    lines = [f"{subject}: {how}" for subject, how in now.items() if printed.get(subject) != how]
    printed.clear()
    printed.update(now)
    return lines


def describe(stage: RunningStage, now: float | None = None) -> str:
    """Return the progress of a stage: its own report, else its elapsed time beside that of its last run."""
    seconds = (time.time() if now is None else now) - stage.began
    at_work = f"{stage.stage}: at work for {facts.duration(seconds)}"
    p = stage.progress
    if p is not None and p.total > 0:
        share = min(1.0, p.done / p.total)
        parts = [f"{_bar(share)} {p.done:,} of {p.total:,} {p.unit} ({100 * share:.0f} %)"]
        parts += [f"{p.rate:,.3g} {p.unit} a second"] if p.rate else []
        parts += [f"{facts.duration(p.seconds_left)} left"] if p.seconds_left is not None else []
        return f"{at_work}  {', '.join(parts)}"
    if stage.expected_seconds:
        return f"{at_work}; the last time it took {facts.duration(stage.expected_seconds)}"
    return at_work


def _bar(share: float) -> str:
    filled = round(_BAR * share)
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"
