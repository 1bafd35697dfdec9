"""`headrace generate`, `headrace simulate-site`: days of a click log, and of visitors of a site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import VAR, Home, Overlays, Panel, Pipeline, Sets, app, examples, overrides, workspace
from headrace.cli.screen import err, log_to_screen, out, table
from headrace.errors import UserError
from headrace.quality.report import facts

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.lake.generate.site import Lists, SiteDay
    from headrace.publish.postgres.server import Connection
    from headrace.publish.postgres.tables import ScoresTable


@app.command(
    rich_help_panel=Panel.SET_UP,
    epilog=examples(
        "headrace generate clicks --until 2026-01-08",
        "headrace generate clicks --start 2026-01-09 --days 3",
        "headrace generate clicks --days 2 --rows-per-day 5000000",
    ),
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
    from headrace.config import load_spec

    rows = [f"generate.rows_per_day={rows_per_day}"] if rows_per_day is not None else []
    spec = load_spec(pipeline, [*overrides(overlays, sets), *rows])
    generate_days(spec, workspace(home).of(spec), requested_days(spec, days, start, until), force, spark)


@app.command(
    "simulate-site",
    epilog=examples(
        "headrace simulate-site clicks --ds 2026-01-09",
        "headrace simulate-site clicks --ds 2026-01-09 --set generate.site.random=0.5",
    ),
    rich_help_panel=Panel.SET_UP,
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
    from headrace.config import load_spec, parse_ds

    spec = load_spec(pipeline, overrides(overlays, sets))
    simulate_day(spec, workspace(home).of(spec), parse_ds(ds), force)


def requested_days(spec: Spec, days: int | None, start: str | None, until: str | None, default: int = 8) -> list[str]:
    """Return the requested days: from `start` (default: the log's first) to `until`, or `days` of them.

    Raises:
        UserError: all three are given and disagree, or the end is before the start.
    """
    from headrace.config import parse_ds

    if spec.generate is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'generate' section, so there is nothing to generate")
    if days is not None and days < 1:
        raise UserError(f"--days {days}: at least 1")
    last = None if until is None else date.fromisoformat(parse_ds(until))
    if start is None and last is not None and days is not None:
        first = last - timedelta(days=days - 1)
    else:
        first = date.fromisoformat(parse_ds(start or spec.generate.start))
    if last is None:
        last = first + timedelta(days=(days or default) - 1)
    if last < first:
        raise UserError(f"the last day {last} is before the first day {first}")
    count = (last - first).days + 1
    if start is not None and until is not None and days is not None and days != count:
        raise UserError(f"--start {start} --until {until} are {count} days, not {days}: leave one of the three out")
    return [(first + timedelta(days=i)).isoformat() for i in range(count)]


def generate_days(spec: Spec, ws: Workspace, days: list[str], force: bool, spark: bool | None) -> None:
    """Make the days that are not there yet, and print a line about each.

    Raises:
        UserError: see headrace.lake.generate.generate.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from headrace.lake.generate import GenerationProgress as Step
    from headrace.lake.generate import generate as make

    log_to_screen()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("files"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        task = bar.add_task("generate", total=None)

        def step(p: Step) -> None:
            total = p.days * p.files
            done = min(total, p.days_done * p.files + p.files_done % p.files)
            bar.update(task, description=p.ds, total=total, completed=done)

        truths = make(spec, ws, days, force=force, spark=spark, progress=step)
    rows_table = table("ds", ">rows", ">lines", ">MiB", ">users", ">items", ">click rate", ">best AUC")
    for t in truths:
        size = sum(f.bytes for f in t.files) / 2**20
        rows_table.add_row(
            t.ds,
            f"{t.rows:,}",
            f"{t.lines:,}",
            f"{size:,.1f}",
            f"{t.users:,}",
            f"{t.items:,}",
            facts.percent(t.base_rate),
            facts.decimals(t.auc_ceiling),
        )
    out.print(rows_table)
    out.print(f"landing files: {ws.landing(spec.pipeline)}", markup=False, soft_wrap=True)


def simulate_day(spec: Spec, ws: Workspace, ds: str, force: bool) -> SiteDay:
    """Simulate the day, and print what was shown and clicked.

    Raises:
        UserError: the lists are of that day or a later one; see `published_lists` and headrace.lake.generate.site.
    """
    from headrace.lake.generate.site import simulate_site as simulate

    log_to_screen()
    with published_lists(spec, ws) as (lists, lists_ds):
        if lists_ds is not None and lists_ds >= ds:
            raise UserError(f"the published lists are of {lists_ds}, made after the visitors of {ds} have left")
        day = simulate(spec, ws, ds, lists, lists_ds, force=force)
    rows_table = table("shown", ">visits", ">impressions", ">clicks", ">CTR", ">expected")
    for name, group in day.shown.items():
        rates = (facts.decimals(group.rate), facts.decimals(group.expected))
        rows_table.add_row(name, f"{group.visits:,}", f"{group.impressions:,}", f"{group.clicks:,}", *rates)
    out.print(rows_table)
    out.print(
        f"lists of {day.lists_ds or 'no day'}; expected CTR of the same visits: "
        f"random {facts.decimals(day.random_rate)}, these lists {facts.decimals(day.list_rate)}, "
        f"best possible {facts.decimals(day.best_rate)}",
        markup=False,
        soft_wrap=True,
    )
    return day


@contextmanager
def published_lists(spec: Spec, ws: Workspace) -> Iterator[tuple[Lists, str | None]]:
    """Yield the lists that a site requests from the warehouse, in the view of the newest day, and that day.

    Raises:
        UserError: the pipeline does not publish to PostgreSQL, nothing was published, or the server fails.
    """
    from psycopg import errors, sql

    from headrace.publish.postgres.server import connect
    from headrace.publish.postgres.tables import ScoresTable
    from headrace.publish.target import table_name

    if spec.publish is None or spec.score is None or spec.publish.warehouse.kind not in ("embedded", "postgres"):
        raise UserError(f"the site reads lists from PostgreSQL, and '{spec.pipeline}' does not publish there")
    scores = ScoresTable(
        spec.publish.warehouse.schema_name, table_name(spec), spec.score.user.key, spec.score.item.key, ()
    )
    with connect(spec.publish.warehouse, ws) as conn:
        try:
            row = conn.execute(sql.SQL("SELECT max(ds) FROM {}").format(scores.current_id)).fetchone()
        except errors.UndefinedTable:
            raise UserError(
                f"there is no view {scores.schema}.{scores.current}: publish a day first, headrace run {spec.argument}"
            ) from None
        newest = None if row is None or row[0] is None else str(row[0])
        yield lambda users: _lists(conn, scores, users), newest


def _lists(conn: Connection, scores: ScoresTable, users: Sequence[int]) -> Mapping[int, Sequence[int]]:
    from psycopg import sql

    query = sql.SQL("SELECT {user}, {item} FROM {view} WHERE {user} = ANY(%s) ORDER BY {user}, rank").format(
        user=sql.Identifier(scores.user), item=sql.Identifier(scores.item), view=scores.current_id
    )
    lists: dict[int, list[int]] = {}
    for user, item in conn.execute(query, [list(users)]):
        lists.setdefault(int(user), []).append(int(item))
    return lists
