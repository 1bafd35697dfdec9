"""`headrace compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Ds, Home, Json, Overlays, Pipeline, Sets, examples, overrides, workspace
from headrace.cli.root import app


@app.command(
    epilog=examples(
        "headrace compare clicks --ds 2026-01-08 --models dcn.yaml,deep.yaml",
        "headrace compare clicks --ds 2026-01-08 --overlay models.yaml --against dcn --json",
        "headrace compare clicks 7 @champion --ds 2026-01-08",
    )
)
def compare(
    pipeline: Pipeline,
    versions: Annotated[
        list[str] | None,
        typer.Argument(
            help="Versions of the registry, or @ and an alias: these, and none is trained.", metavar="[VERSION...]"
        ),
    ] = None,
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
    """Test several models against each other on a day's rows: train those of the section compare, or of files; or take
    registered versions as they are.

    What is trained already is not trained again, and what was stopped goes on with the same command. None is
    registered: the day's model stays what it is. The day's next report has the table.

    Registered versions, whichever days they were trained for, predict the day's split as they are, each by its own
    workflow; the others are tested against the first.
    """
    from headrace.commands.compare import compare as command
    from headrace.commands.compare import compare_versions

    if versions:
        raise typer.Exit(compare_versions(pipeline, workspace(home), ds, overrides(overlays, sets), versions, as_json))

    files = [Path(name) for name in models.split(",") if name]
    raise typer.Exit(command(pipeline, workspace(home), ds, overrides(overlays, sets), files, against, as_json))
