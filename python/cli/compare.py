"""`headrace compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Ds, Home, Json, Overlays, Pipeline, Sets, examples, overrides
from headrace.cli.root import app
from headrace.workspace import Workspace


@app.command(
    epilog=examples(
        "headrace compare clicks --ds 2026-01-08 --models dcn.yaml,deep.yaml",
        "headrace compare clicks --ds 2026-01-08 --overlay models.yaml --against dcn --json",
    )
)
def compare(
    pipeline: Pipeline,
    ds: Ds = None,
    models: Annotated[
        str,
        typer.Option(
            help="Files with keys of model, train or baseline, a model each, besides the pipeline's own settings.",
            metavar="FILE,FILE...",
        ),
    ] = "",
    against: Annotated[
        str | None, typer.Option(help="The model that the others are tested against; else the first.", metavar="NAME")
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Train several models over a day's dataset and test them against each other.

    The models are those of the section compare of the spec, or of files. What is trained already is not trained again,
    and what was stopped goes on with the same command. None is registered: the day's model stays what it is. The day's
    next report has the table.
    """
    from headrace.commands.compare import compare as command

    files = [Path(name) for name in models.split(",") if name]
    raise typer.Exit(command(pipeline, Workspace(home), ds, overrides(overlays, sets), files, against, as_json))
