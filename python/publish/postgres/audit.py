"""Step two, audit: what must hold for the staged scores, asked of the warehouse itself, in SQL."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from headrace.publish.postgres.server import Connection
from headrace.publish.postgres.tables import PUBLICATIONS, ScoresTable
from headrace.publish.target import Check, Limits


def audit(conn: Connection, staging: sql.Identifier, table: ScoresTable, ds: str, limits: Limits) -> list[Check]:
    """All checks on a staging table, failed ones included.

    Args:
        conn: the warehouse.
        staging: the staged scores.
        table: where they are to go.
        ds: their day.
        limits: what they are held against.
    """
    user, item = sql.Identifier(table.user), sql.Identifier(table.item)
    nulls = sql.SQL(" OR ").join(sql.SQL("{} IS NULL").format(sql.Identifier(c.name)) for c in table.columns)
    names: dict[str, sql.Composable] = {"staging": staging, "user": user, "item": item, "nulls": nulls}

    def none_of(name: str, query: str) -> Check:
        """A check that a query of offenders (first column: whom to name) is empty."""
        offenders = sql.SQL(query).format(**names)
        params: list[Any] = [ds] if "%s" in query else []
        count = conn.execute(sql.SQL("SELECT count(*) FROM ({}) AS found").format(offenders), params).fetchone()
        assert count is not None
        if not count[0]:
            return Check(name, 0, "0", True)
        shown = conn.execute(sql.SQL("{} LIMIT 3").format(offenders), params).fetchall()
        return Check(name, int(count[0]), "0", False, "for example " + ", ".join(f"{row[0]}" for row in shown))

    counted = conn.execute(sql.SQL("SELECT count(*) FROM {}").format(staging)).fetchone()
    rows = int(counted[0]) if counted else 0
    checks = [
        Check("rows as the scores' manifest states", rows, str(limits.expected_rows), rows == limits.expected_rows),
        Check("rows", rows, f"at least {limits.min_rows}", rows >= limits.min_rows),
        none_of(
            "rows with a null",
            "SELECT concat_ws(', ', 'user ' || {user}, 'rank ' || rank) FROM {staging} WHERE {nulls}",
        ),
        none_of("rows of another day", "SELECT ds FROM {staging} WHERE ds <> %s"),
        none_of(
            "keys (user, rank) given twice",
            "SELECT 'user ' || {user} || ' rank ' || rank FROM {staging} GROUP BY {user}, rank HAVING count(*) > 1",
        ),
        none_of(
            "items given twice to a user",
            "SELECT 'user ' || {user} || ' item ' || {item} FROM {staging} GROUP BY {user}, {item} HAVING count(*) > 1",
        ),
        none_of(
            "users whose ranks are not 1, 2, ...",
            "SELECT 'user ' || {user} FROM {staging} GROUP BY {user} "
            "HAVING min(rank) <> 1 OR max(rank) <> count(DISTINCT rank)",
        ),
        none_of(
            f"users with more than {limits.top_k} items",
            f"SELECT 'user ' || {{user}} FROM {{staging}} GROUP BY {{user}} HAVING count(*) > {int(limits.top_k)}",
        ),
        # PostgreSQL sorts NaN above all numbers, so it is outside too.
        none_of("scores outside [0, 1]", "SELECT score FROM {staging} WHERE NOT (score >= 0 AND score <= 1)"),
        none_of(
            "scores above that of a better rank",
            "SELECT 'user ' || name || ' rank ' || rank FROM (SELECT {user} AS name, rank, score, lag(score) OVER "
            "(PARTITION BY {user} ORDER BY rank) AS better FROM {staging}) AS s WHERE score > better",
        ),
    ]
    if limits.max_row_change is not None:
        checks.append(_row_change(conn, table, ds, rows, limits.max_row_change))
    return checks


def _row_change(conn: Connection, table: ScoresTable, ds: str, rows: int, limit: float) -> Check:
    last = conn.execute(
        sql.SQL("SELECT ds, rows FROM {} WHERE table_name = %s AND ds < %s ORDER BY ds DESC LIMIT 1").format(
            sql.Identifier(table.schema, PUBLICATIONS)
        ),
        [table.name, ds],
    ).fetchone()
    name = "change of the number of rows"
    if last is None or not last[1]:
        return Check(name, 0.0, f"at most {limit:g}", True, "no earlier day")
    change = abs(rows - last[1]) / last[1]
    return Check(name, round(change, 4), f"at most {limit:g}", change <= limit, f"{last[1]:,} rows on {last[0]}")
