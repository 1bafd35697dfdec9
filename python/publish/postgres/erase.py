"""Rows of some users or items that go from all days of a table, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from psycopg import sql

from headrace.publish.postgres.fencing import claim_in_time, make_fences
from headrace.publish.postgres.server import Connection
from headrace.publish.postgres.tables import PUBLICATIONS, columns_of
from headrace.publish.target import Key
from headrace.storage import Fence


def rows_with(conn: Connection, schema: str, name: str, column: str, keys: Sequence[Key]) -> dict[str, int]:
    """By day, the rows with one of these keys in a column."""
    if column not in columns_of(conn, schema, name):
        return {}
    counted = sql.SQL("SELECT ds, count(*) FROM {} WHERE {} = ANY(%s) GROUP BY ds ORDER BY ds")
    rows = conn.execute(counted.format(sql.Identifier(schema, name), sql.Identifier(column)), [list(keys)])
    return {day.isoformat(): int(count) for day, count in rows.fetchall()}


def erase(
    conn: Connection, schema: str, name: str, column: str, keys: Sequence[Key], fence: Fence | None = None
) -> None:
    """Remove them. Readers see all of them or none; then VACUUM frees their space.

    What the server's write-ahead log, its backups and its replicas hold is theirs to let go.
    """
    table, of = sql.Identifier(schema, name), sql.Identifier(column)
    make_fences(conn, schema, fence)
    with conn.transaction():
        claim_in_time(conn, schema, name, fence)
        gone = sql.SQL(
            "WITH gone AS (DELETE FROM {} WHERE {} = ANY(%s) RETURNING ds) SELECT ds, count(*) FROM gone GROUP BY ds"
        )
        days: list[tuple[date, int]] = conn.execute(gone.format(table, of), [list(keys)]).fetchall()
        for day, count in days:
            conn.execute(
                sql.SQL("UPDATE {} SET rows = rows - %s WHERE table_name = %s AND ds = %s").format(
                    sql.Identifier(schema, PUBLICATIONS)
                ),
                [count, name, day],
            )
    conn.execute(sql.SQL("VACUUM ANALYZE {}").format(table))
