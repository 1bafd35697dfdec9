"""Commands about data that comes in: `init`, `generate`, `simulate-site`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import VAR, Home, Overlays, Pipeline, Sets, examples, overrides, workspace
from headrace.cli.root import app


@app.command(
    epilog=examples(
        "headrace init clicks.csv.gz",
        "headrace init '/data/clicks/*/*.jsonl' -o clicks.yaml --label clicked",
        "headrace init census.data --label income --positive '>50K'",
        "headrace init /lake/events",
        "headrace init s3://bucket/events",
    )
)
def init(
    path: Annotated[
        str,
        typer.Argument(
            metavar="TABLE_OR_PATH",
            help="A file, a folder, a glob in quotes, or the folder of a table, which may be in a store (s3://...).",
        ),
    ],
    target: Annotated[
        Path | None, typer.Option("-o", "--out", help="The pipeline's file; default: NAME.yaml here.", metavar="FILE")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The pipeline's name; default: the path's.", metavar="NAME")] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.", metavar="COLUMN")] = None,
    positive: Annotated[str | None, typer.Option(help="The label's value that means 1.", metavar="VALUE")] = None,
    time: Annotated[str | None, typer.Option(help="The column of the event's time.", metavar="COLUMN")] = None,
    key: Annotated[str | None, typer.Option(help="The column that numbers the rows.", metavar="COLUMN")] = None,
    user: Annotated[
        str | None, typer.Option(help="The column of the users that items are scored for.", metavar="COLUMN")
    ] = None,
    item: Annotated[str | None, typer.Option(help="The column of the items that are scored.", metavar="COLUMN")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Look at data of your own and write a pipeline for it, with a comment at each choice.

    CSV, JSON lines, Parquet, ORC, Avro, Delta and Iceberg. Types, missing values, the label, the time, users and items
    are told from a part of the rows, by names and values; the options say what you know better. The pipeline runs as
    it is.
    """
    from headrace.commands.init import init as command
    from headrace.commands.scaffold.roles import Named

    command(path, target, name, Named(label, positive, time, key, user, item), force)


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
    force: Annotated[bool, typer.Option("--force", help="Make existing days again.")] = False,
    spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Let Spark write the files; default: above 2 million rows a day."),
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write days of a click log as landing files, with the best AUC that any model could reach on them."""
    from headrace.commands import generate as command
    from headrace.config import load_spec

    rows = [f"generate.rows_per_day={rows_per_day}"] if rows_per_day is not None else []
    spec = load_spec(pipeline, [*overrides(overlays, sets), *rows])
    command.generate(spec, workspace(home).of(spec), command.wanted_days(spec, days, start, until), force, spark)


@app.command(
    "simulate-site",
    epilog=examples(
        "headrace simulate-site clicks --ds 2026-01-09",
        "headrace simulate-site clicks --ds 2026-01-09 --set generate.site.random=0.5",
    ),
)
def simulate_site(
    pipeline: Pipeline,
    ds: Annotated[str, typer.Option("--ds", help="The day of the visits.", metavar="DATE")],
    force: Annotated[bool, typer.Option("--force", help="Replace the day if it has landed already.")] = False,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Show the published lists to the generator's users, and write their clicks as the landing files of a day.

    Reads the newest published day from PostgreSQL, as a site would; `headrace generate` makes days without lists.
    """
    from headrace.commands.simulate_site import simulate_site as command
    from headrace.config import load_spec, parse_ds

    spec = load_spec(pipeline, overrides(overlays, sets))
    command(spec, workspace(home).of(spec), parse_ds(ds), force)


@app.command(epilog=examples("headrace reference > docs/reference.md", "headrace reference | less"))
def reference() -> None:
    """Print every key of a pipeline's YAML and every operator: type, default, meaning (docs/reference.md)."""
    from headrace.commands.reference import reference as command

    command()
