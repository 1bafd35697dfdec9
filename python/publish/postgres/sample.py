"""A look at what was published."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from headrace.publish.postgres.server import Connection


def sample(conn: Connection, schema: str, name: str, ds: str, n: int = 10) -> list[dict[str, Any]]:
    """The first rows of a day, by primary key: column -> value, in the table's order of columns.

    Args:
        conn: the warehouse.
        schema: the table's schema; any text, dots included.
        name: the table.
        ds: the day.
        n: rows.
    """
    table = sql.Identifier(schema, name)
    cursor = conn.execute(sql.SQL("SELECT * FROM {} WHERE ds = %s ORDER BY 1, 2, 4 LIMIT %s").format(table), [ds, n])
    columns = [c.name for c in cursor.description or ()]
    return [dict(zip(columns, row, strict=True)) for row in cursor]
