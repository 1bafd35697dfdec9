"""`headrace tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Ds, Home, Overlays, Pipeline, Sets, examples, overrides, workspace
from headrace.cli.root import app


@app.command(
    epilog=examples(
        "headrace tune clicks --ds 2026-01-08 --trials 30",
        "headrace tune clicks --ds 2026-01-08 --trials 200 --seconds 3600",
        "headrace tune clicks --ds 2026-01-08 --overlay space.yaml --out best.yaml",
        "headrace run clicks --ds 2026-01-08 --from train --overlay best.yaml",
    )
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
    from headrace.commands.tune import tune as command

    command(pipeline, workspace(home), ds, overrides(overlays, sets), trials, seconds, target)
