"""`headrace score`: the stage, or a table of one's own."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import VAR, Ds, Home, Model, Overlays, Pipeline, Sets, examples, overrides, workspace
from headrace.cli.root import app
from headrace.stages import STAGES


@app.command(
    short_help=STAGES["score"].help,
    rich_help_panel="Stages, in the day's order",
    epilog=examples(
        "headrace score clicks --ds 2026-01-08",
        "headrace score clicks --ds 2026-01-09 --model @champion",
        "headrace score clicks --ds 2026-01-09 --set score.incremental=true",
        "headrace score clicks --ds 2026-01-08 --input pairs --output scored --model 7",
    ),
)
def score(
    pipeline: Pipeline,
    ds: Ds = None,
    model: Model = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="Score the rows of this table instead: a Delta table, a folder or file of Parquet, or a file of CSV "
            "whose first line names its columns. It may be in a store (s3://...).",
            metavar="TABLE",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--output", help="Where these rows go, with their scores: a new folder on a file system.", metavar="TABLE"
        ),
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Score users x candidate items and keep the best for each user: the same as `run --from score --to score`.

    With score.incremental only users whose columns, candidates or model have changed are scored again; the result is
    the same.

    With --input and --output it scores any rows: pairs of a user and an item, whose other columns are those of the
    users and items of the day, or whole rows with the columns of the features.
    """
    from headrace.commands.run import run as run_stages
    from headrace.commands.score import score_rows

    settings = overrides(overlays, sets, model)
    if source is None and target is None:
        raise typer.Exit(run_stages(pipeline, workspace(home), ds, settings, "score", "score"))
    if source is None or target is None:
        raise typer.BadParameter("--input and --output go together")
    score_rows(pipeline, workspace(home), ds, settings, source, target)
