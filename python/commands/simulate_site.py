"""`headrace simulate-site`: a day of visitors who are shown the published lists, as landing files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from psycopg import errors, sql

from headrace.commands.screen import log_to_screen, out, table
from headrace.config import Spec
from headrace.errors import UserError
from headrace.generate.site import Lists, SiteDay
from headrace.generate.site import simulate_site as simulate
from headrace.publish.postgres.server import Connection, connect
from headrace.publish.postgres.tables import ScoresTable
from headrace.publish.target import table_name
from headrace.quality.report import facts
from headrace.workspace import Workspace


def simulate_site(spec: Spec, ws: Workspace, ds: str, force: bool) -> SiteDay:
    """Simulate the day, and print what was shown and clicked.

    Raises:
        UserError: the lists are of that day or a later one; see `published_lists` and headrace.generate.site.
    """
    log_to_screen()
    with published_lists(spec, ws) as (lists, lists_ds):
        if lists_ds is not None and lists_ds >= ds:
            raise UserError(f"the published lists are of {lists_ds}, made after the visitors of {ds} have left")
        day = simulate(spec, ws, ds, lists, lists_ds, force=force)
    rows_table = table("shown", ">visits", ">impressions", ">clicks", ">CTR", ">expected")
    for name, of in day.shown.items():
        rates = (facts.decimals(of.rate), facts.decimals(of.expected))
        rows_table.add_row(name, f"{of.visits:,}", f"{of.impressions:,}", f"{of.clicks:,}", *rates)
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
    query = sql.SQL("SELECT {user}, {item} FROM {view} WHERE {user} = ANY(%s) ORDER BY {user}, rank").format(
        user=sql.Identifier(scores.user), item=sql.Identifier(scores.item), view=scores.current_id
    )
    found: dict[int, list[int]] = {}
    for user, item in conn.execute(query, [list(users)]):
        found.setdefault(int(user), []).append(int(item))
    return found
