"""Scores without Spark, and publishing them to the PostgreSQL of the wheel: for tests of the warehouse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import sql

from headrace.publish.postgres import server as warehouse
from headrace.publish.postgres import staging, swap, tables
from headrace.publish.target import Check

DS = "2026-01-10"
TYPES = [
    ("ds", "string"),
    ("user_id", "bigint"),
    ("item_id", "string"),
    ("rank", "int"),
    ("score", "float"),
    ("model_version", "string"),
]
TABLE = tables.scores_table("public", "clicks_scores", "user_id", "item_id", TYPES)
Row = tuple[Any, ...]


def good_rows(users: int = 4, k: int = 3, model: str = "m1", ds: str = DS) -> list[Row]:
    keys = [(u, r) for u in range(users) for r in range(1, k + 1)]
    return [(ds, u, f'item, "{u}" {r}', r, 1.0 / (r + u), model) for u, r in keys]


def fill(conn: warehouse.Connection, staged: staging.PostgresStagedDay, rows: Sequence[Row]) -> None:
    marks = sql.SQL(", ").join([sql.SQL("%s")] * (len(rows[0]) if rows else 0))
    with conn.cursor() as cursor:
        cursor.executemany(sql.SQL("INSERT INTO {} VALUES ({})").format(staged.id, marks), rows)
    staged.rows = len(rows)


def publish(
    conn: warehouse.Connection, rows: Sequence[Row], key: str = "k", ds: str = DS, table: tables.ScoresTable = TABLE
) -> None:
    with staging.staging_table(conn, table, ds, key) as staged:
        fill(conn, staged, rows)
        swap.swap(conn, staged, table, "lake/clicks/scores@3", [Check("rows", len(rows), "at least 1", True)])


def day(conn: warehouse.Connection, ds: str = DS) -> list[Row]:
    return conn.execute("SELECT * FROM clicks_scores WHERE ds = %s ORDER BY user_id, rank", [ds]).fetchall()


def staging_tables(conn: warehouse.Connection) -> list[str]:
    """The days that have any, as `ScoresTable.staging`."""
    found = conn.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND starts_with(relname, %s)", [tables.STAGING_PREFIX]
    )
    return sorted({name[: len(TABLE.staging(DS))] for (name,) in found})
