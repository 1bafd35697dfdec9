"""`headrace tune`: short runs with other settings, and the best of them as a file for `--overlay`."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from headrace.cli.root import VAR, Ds, Home, Overlays, Panel, Pipeline, Sets, app, examples, overrides, workspace
from headrace.cli.run import resolve
from headrace.cli.screen import log_to_screen, out, table

if TYPE_CHECKING:
    from headrace.config import Search, Spec
    from headrace.config.workspace import Workspace


@app.command(
    rich_help_panel=Panel.MODELS,
    epilog=examples(
        "headrace tune clicks --ds 2026-01-08 --trials 30",
        "headrace tune clicks --ds 2026-01-08 --trials 200 --seconds 3600",
        "headrace tune clicks --ds 2026-01-08 --overlay space.yaml --out best.yaml",
        "headrace run clicks --ds 2026-01-08 --from train --overlay best.yaml",
    ),
)
def tune(
    pipeline: Pipeline,
    ds: Ds = None,
    trials: Annotated[
        int | None, typer.Option(help="Short for --set train.search.trials=N.", metavar="N", min=1)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Short for --set train.search.total_seconds=N.", metavar="N", min=1)
    ] = None,
    target: Annotated[Path | None, typer.Option("--out", help="Copy the best settings there.", metavar="FILE")] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Search for better settings by short runs on a sample of the day's dataset.

    What is tried is the section train.search of the spec: values of its fields, and several models. A search that was
    stopped goes on with the same command.
    """
    search_settings(pipeline, workspace(home), ds, overrides(overlays, sets), trials, seconds, target)


def search_settings(
    pipeline: str,
    ws: Workspace,
    ds: str | None,
    overrides: Sequence[str],
    trials: int | None,
    seconds: float | None,
    target: Path | None,
) -> None:
    """Search, showing each trial as it ends, and all of them at the end.

    Args:
        pipeline: a shipped pipeline's name or a YAML file.
        ws: the workspace.
        ds: the day whose dataset is trained on; None: the spec's.
        overrides: `key=value` for the spec.
        trials: instead of the spec's number.
        seconds: of all trials together, instead of the spec's number.
        target: where the best settings are written besides the search's folder.

    Raises:
        UserError: no section train.search, no dataset, a value that the spec refuses.
    """
    from headrace.config import load_spec
    from headrace.storage import local

    if trials is not None:
        overrides = [*overrides, f"train.search.trials={trials}"]
    if seconds is not None:
        overrides = [*overrides, f"train.search.total_seconds={seconds}"]
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    # Late: Optuna and torch; a misspelt key should be told at once.
    from headrace.train.callbacks.progress import ProgressBar, ProgressEvent
    from headrace.train.search_space import overrides_of
    from headrace.train.tuner import Trial, Tuner, show_value

    log_to_screen()
    bar = ProgressBar() if sys.stderr.isatty() else None

    def spec_of(values: Mapping[str, Any]) -> Spec:
        return load_spec(pipeline, [*overrides, *overrides_of(values)])

    def show_progress(event: ProgressEvent) -> None:
        if bar is not None:
            bar.update(event)

    def on_trial(trial: Trial) -> None:
        if bar is not None:
            bar.end()
        name = "as it is" if trial.number is None else f"trial {trial.number + 1}/{search.trials}"
        result = f"{search.objective} {show_value(trial.value)}" + (f", {trial.reason}" if trial.reason else "")
        model = f"{trial.model}: " if trial.model else ""
        out.print(f"{name}: {result}  {model}{_settings(trial.values)}  {trial.seconds:.1f} s", markup=False)

    tuner = Tuner(spec, spec_of, ws, day, on_trial=on_trial, on_progress=show_progress)
    search = tuner.search
    out.print(
        f"{_space_summary(search)}, {search.trials} trials, {search.objective} on the split "
        f"{'rank' if search.of_lists else 'valid'} of {escape(spec.pipeline)}, {day}: {tuner.folder}"
    )
    loop = logging.getLogger("headrace.train")
    loop.setLevel(logging.WARNING)  # what each trial has to say is in its line
    try:
        outcome = tuner.run()
    finally:
        loop.setLevel(logging.NOTSET)
    out.print()
    out.print(_trials_table(outcome.trials, outcome.best, search))
    out.print()
    first = show_value(outcome.trials[0].value)
    if outcome.best is None:
        out.print(f"No trial was better than the settings as they are ({search.objective} {first}).")
        return
    path = outcome.overlay
    if target is not None:
        path = local(target)
        path.copy_from(outcome.overlay)
    out.print(
        f"The best: trial {(outcome.best.number or 0) + 1}, {search.objective} {show_value(outcome.best.value)} "
        f"(as it is: {first}). Its settings: {path}\n"
        f"headrace run {spec.argument} --ds {day} --from train --overlay {shlex.quote(str(path))}",
        markup=False,
        soft_wrap=True,
    )


def _trials_table(trials: Sequence[Any], best: Any, search: Search) -> Table:
    from headrace.config.load import flow
    from headrace.train.tuner import show_value

    paths = dict.fromkeys([*search.parameters, *(p for m in search.models.values() for p in m.parameters)])
    model = ["model"] if search.models else []
    rows_table = table("trial", *model, f">{search.objective}", ">steps", ">seconds", *paths, "")
    for t in trials:
        name = "as it is" if t.number is None else str(t.number + 1)
        note = "best" if best is not None and t.number == best.number else t.reason or t.state * (t.state == "pruned")
        values = [flow(t.values[p]) if p in t.values else "" for p in paths]
        model_cell = [t.model or ""] if search.models else []
        cells = (*model_cell, show_value(t.value), f"{t.steps:,}", f"{t.seconds:.1f}")
        rows_table.add_row(name, *cells, *map(escape, values), escape(note))
    return rows_table


def _space_summary(search: Search) -> str:
    count = len(search.parameters) + sum(len(m.parameters) for m in search.models.values())
    models = f"{len(search.models)} models, " if search.models else ""
    return f"{models}{count} parameter(s)"


def _settings(values: Mapping[str, Any]) -> str:
    from headrace.config.load import flow

    return ", ".join(f"{path}={flow(value)}" for path, value in values.items())
