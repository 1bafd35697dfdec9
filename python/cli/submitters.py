"""`headrace spark-properties`, `headrace pack`: files for submitters other than `headrace run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import VAR, Ds, Home, Panel, Pipeline, Sets, app, examples, workspace
from headrace.cli.screen import out
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.storage import Location


@app.command(
    "spark-properties", hidden=True, epilog=examples("headrace spark-properties clicks --out clicks.properties")
)
def spark_properties(
    pipeline: Pipeline,
    out: Annotated[Path | None, typer.Option(help="Default: below the workspace.", metavar="FILE")] = None,
    unless_done: Annotated[
        str | None, typer.Option("--unless-done", help="Print nothing where this stage has nothing to do.")
    ] = None,
    ds: Ds = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write the Spark properties file of a pipeline (for other submitters) and print its path."""
    from headrace.config import load_spec
    from headrace.jobs.submit import properties_file, write_properties
    from headrace.storage import local

    spec = load_spec(pipeline, sets or [])
    ws = workspace(home).of(spec)
    if unless_done is not None and ds is not None and _is_done(unless_done, spec, ws, ds):
        return
    path = local(out) if out else properties_file(ws, spec.pipeline)
    write_properties(spec, ws, path)
    typer.echo(path)


@app.command(
    rich_help_panel=Panel.OPERATE,
    epilog=examples(
        "headrace pack environment.tar.gz",
        "headrace pack s3://bucket/features.tar.gz --leave-out pyspark --leave-out torch --leave-out horovod",
    ),
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
    from headrace.storage import location_of

    pack_environment(location_of(out, "FILE"), leave_out or [])


def _is_done(name: str, spec: Spec, ws: Workspace, ds: str) -> bool:
    """Return whether a stage has nothing to do. Where that cannot be told, its job says why."""
    from headrace.jobs.check_specs import check_spec
    from headrace.jobs.stages import load_stage
    from headrace.stage import check_stage
    from headrace.storage import StoreError

    try:
        check_spec(spec)
        return check_stage(load_stage(name), spec, ws, ds) is None
    except (UserError, StoreError):
        return False


_MIB = 2**20


def pack_environment(file: Location, left_out: Sequence[str]) -> None:
    """Write the archive and say how to use it.

    Raises:
        UserError: the file's name is not one that Spark unpacks, or a package cannot go along.
    """
    from headrace.jobs.pack import pack as write

    if not file.name.endswith((".tar.gz", ".tgz")):
        raise UserError(f"{file}: Spark unpacks archives by their names; call it .tar.gz")
    packed = write(file, left_out)
    for dependent, package in packed.missed:
        out.print(f"without {package}, which {dependent} needs", markup=False)
    size = f"{file.size() / _MIB:,.0f} MiB, {packed.unpacked / _MIB:,.0f} unpacked"
    out.print(f"{file}: {packed.packages} packages, {packed.files:,} files, {size}", markup=False, soft_wrap=True)
    properties = f"{{spark.archives: {file}#environment, spark.pyspark.python: ./environment/bin/python}}"
    out.print(f"spark.properties: {properties}", markup=False, soft_wrap=True)
