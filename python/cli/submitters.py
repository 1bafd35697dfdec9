"""Commands for other submitters than `headrace run`: `spark-properties`, `pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Pipeline, Sets, examples, workspace
from headrace.cli.root import app
from headrace.storage import local, location_of


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

    spec = load_spec(pipeline, sets or [])
    ws = workspace(home).of(spec)
    path = local(out) if out else properties_file(ws, spec.pipeline)
    write_properties(spec, ws, path)
    typer.echo(path)


@app.command(
    epilog=examples(
        "headrace pack environment.tar.gz",
        "headrace pack s3://bucket/features.tar.gz --leave-out pyspark --leave-out torch --leave-out horovod",
    )
)
def pack(
    out: Annotated[str, typer.Argument(metavar="FILE", help="The archive, a .tar.gz: a path, or a URI of a store.")],
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            help="A package that executors do without, and all that only it needs; may be repeated.", metavar="PACKAGE"
        ),
    ] = None,
) -> None:
    """Pack this environment for executors that have Python of the same version and nothing else.

    With spark.properties {spark.archives: FILE#environment, spark.pyspark.python: ./environment/bin/python}.
    """
    from headrace.commands.pack import pack as run

    run(location_of(out, "FILE"), leave_out or [])
