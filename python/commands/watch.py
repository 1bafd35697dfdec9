"""`headrace status --watch`: the same, again and again, with how far the stages at work are."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.live import Live

from headrace.commands.screen import out, plain
from headrace.commands.status import StageState, look, state_table
from headrace.jobs.observe.running import RunningStage
from headrace.quality.report import facts
from headrace.workspace import Workspace

_BAR = 24


def watch(
    ws: Workspace, pipeline: str | None, ds: str | None, last: int, every: float, overrides: Sequence[str] = ()
) -> None:
    """Show the state every so many seconds until Ctrl-C: on a terminal in one place, elsewhere lines of what is new.

    Raises:
        UserError: the pipeline is unknown, a manifest is damaged.
    """
    said: dict[str, str] = {}
    try:
        if not out.is_terminal:
            while True:
                for line in _news(ws, *look(ws, pipeline, ds, last, False, overrides), said):
                    out.print(line, markup=False, soft_wrap=True)
                time.sleep(every)
        with Live(console=out, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(_screen(ws, *look(ws, pipeline, ds, last, False, overrides)), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


def _screen(ws: Workspace, states: Sequence[StageState], busy: dict[str, str]) -> RenderableType:
    parts: list[RenderableType] = [state_table(states)] if states else [plain("nothing has run yet", style="dim")]
    for name in busy:
        parts += [plain(f"{name} {stage.ds} {describe(stage)}") for stage in RunningStage.read(ws, name)] or [
            plain(f"{name}: a stage is at work ({busy[name]})")
        ]
    return Group(*parts)


def _news(ws: Workspace, states: Sequence[StageState], busy: dict[str, str], said: dict[str, str]) -> list[str]:
    """Return lines that were not printed yet: states that have changed, and the progress of running stages."""
    now = {f"{s.pipeline} {s.ds} {s.stage}": s.state + (f": {s.reason}" if s.reason else "") for s in states}
    for name in busy:
        for stage in RunningStage.read(ws, name):
            now[f"{name} {stage.ds} {stage.stage} at work"] = describe(stage)
    lines = [f"{what}: {how}" for what, how in now.items() if said.get(what) != how]
    said.clear()
    said.update(now)
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
