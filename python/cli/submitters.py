"""Commands for other submitters than `headrace run`: `spark-properties`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Pipeline, Sets, examples
from headrace.cli.root import app
from headrace.storage import local
from headrace.workspace import Workspace


@app.command(
    "spark-properties", hidden=True, epilog=examples("headrace spark-properties clicks --out clicks.properties")
)
def spark_properties(
    pipeline: Pipeline,
    out: Annotated[Path | None, typer.Option(help="Default: below the workspace.", metavar="FILE")] = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write the Spark properties file of a pipeline (for other submitters) and print its path."""
    from headrace.config import load_spec
    from headrace.jobs.submit import properties_file, write_properties

    spec, ws = load_spec(pipeline, sets or []), Workspace(home)
    path = local(out) if out else properties_file(ws, spec.pipeline)
    write_properties(spec, ws, path)
    typer.echo(path)
