"""`headrace warehouse ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.groups import Group
from headrace.cli.options import VAR, Ds, Home, MaybePipeline, Pipeline, examples, workspace
from headrace.cli.root import app

warehouse_app = typer.Typer(cls=Group, no_args_is_help=True, help="The embedded PostgreSQL, and what is published.")
app.add_typer(warehouse_app, name="warehouse")


@warehouse_app.command("start", epilog=examples("headrace warehouse start"))
def warehouse_start(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Start the embedded PostgreSQL and leave it running; say how to open it."""
    from headrace.commands.warehouse import start

    start(workspace(home), pipeline)


@warehouse_app.command("stop", epilog=examples("headrace warehouse stop"))
def warehouse_stop(home: Home = VAR) -> None:
    """Stop the embedded PostgreSQL."""
    from headrace.commands.warehouse import stop

    stop(workspace(home))


@warehouse_app.command("status", epilog=examples("headrace warehouse status"))
def warehouse_status(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Say whether the embedded PostgreSQL runs and how to open it."""
    from headrace.commands.warehouse import status

    status(workspace(home), pipeline)


@warehouse_app.command("sample", epilog=examples("headrace warehouse sample clicks --ds 2026-01-08 --rows 20"))
def warehouse_sample(
    pipeline: Pipeline,
    ds: Ds = None,
    rows: Annotated[int, typer.Option(help="Number of rows.", metavar="N", min=1)] = 10,
    home: Home = VAR,
) -> None:
    """Show the first published scores of a day as psql would; default: of the newest day."""
    from headrace.commands.warehouse import sample

    sample(workspace(home), pipeline, ds, rows)


@warehouse_app.command("drop-kept", epilog=examples("headrace warehouse drop-kept clicks"))
def warehouse_drop_kept(pipeline: Pipeline, home: Home = VAR) -> None:
    """Drop staged scores that failed their audit and were kept for a look."""
    from headrace.commands.warehouse import drop_kept

    drop_kept(workspace(home), pipeline)
