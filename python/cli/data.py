"""Commands about data that comes in: `generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Pipeline, Sets, examples
from headrace.cli.root import app
from headrace.workspace import Workspace


@app.command(
    epilog=examples(
        "headrace generate clicks --until 2026-01-08",
        "headrace generate clicks --start 2026-01-09 --days 3",
        "headrace generate clicks --days 2 --rows-per-day 5000000",
    )
)
def generate(
    pipeline: Pipeline,
    days: Annotated[int | None, typer.Option(help="How many days (8 without --until).", metavar="N")] = None,
    start: Annotated[
        str | None,
        typer.Option("--start", "--ds", help="The first of them; default: the log's first day.", metavar="DATE"),
    ] = None,
    until: Annotated[str | None, typer.Option(help="The last of them.", metavar="DATE")] = None,
    rows_per_day: Annotated[
        int | None, typer.Option(help="Short for --set generate.rows_per_day=N.", metavar="N")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make days again that are there already.")] = False,
    spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Let Spark write the files; default: above 2 million rows a day."),
    ] = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write days of a click log as landing files, with the best AUC that any model could reach on them."""
    from headrace.commands import generate as command
    from headrace.config import load_spec

    overrides = [*(sets or []), *([f"generate.rows_per_day={rows_per_day}"] if rows_per_day is not None else [])]
    spec = load_spec(pipeline, overrides)
    command.generate(spec, Workspace(home), command.wanted_days(spec, days, start, until), force, spark)
