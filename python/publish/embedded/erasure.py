"""Erased rows of the embedded server, gone from its files, too.

A DELETE leaves rows in the table's files until they are overwritten; statistics of columns have values, and the
write-ahead log has all of them. So the tables and the catalog of statistics are written anew (VACUUM FULL), and the
log's older segments are removed by a checkpoint, not kept for another use. Who is killed meanwhile leaves a mark, by
which the next erasure does it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from headrace.publish.embedded.roles import superuser_connection

#: Below the server's folder: rows were erased, and may be in its files.
_MARK = "erasing"
#: The catalog of statistics; values of columns are in no other one.
_STATISTICS = ("pg_catalog", "pg_statistic")


def is_unfinished(folder: Path) -> bool:
    """Whether an erasure was killed before the server's files were without its rows."""
    return (folder / _MARK).exists()


@contextmanager
def erased_from_files(folder: Path, port: int, database: str, schema: str, name: str) -> Iterator[None]:
    """Take what the block deletes from a table, and drops, out of the server's files at its end.

    Args:
        folder: the server's (`Workspace.postgres`).
        port: of the running server.
        database: of the table.
        schema: of the table.
        name: of the table; its partitions and what is beside it in the schema are written anew, too.
    """
    (folder / _MARK).touch()
    yield
    with superuser_connection(folder, port, database) as conn:
        tables = conn.execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r' AND (c.relname = %s OR starts_with(c.relname, %s))",
            [schema, name, f"{name}_"],
        ).fetchall()
        for table in tables:
            conn.execute(sql.SQL("VACUUM (FULL, ANALYZE) {}").format(sql.Identifier(*table)))
        _analyze(conn, schema, name)
        conn.execute(sql.SQL("VACUUM (FULL) {}").format(sql.Identifier(*_STATISTICS)))
        # Else segments of the log are renamed for what is still to come, with all that is in them.
        conn.execute("ALTER SYSTEM SET wal_recycle = off")
        conn.execute("SELECT pg_reload_conf()")
        try:
            # The second one begins behind the first, in another segment: no crash needs what is before it.
            for _ in range(2):
                conn.execute("SELECT pg_switch_wal()")
                conn.execute("CHECKPOINT")
        finally:
            conn.execute("ALTER SYSTEM RESET wal_recycle")
            conn.execute("SELECT pg_reload_conf()")
    (folder / _MARK).unlink()


def _analyze(conn: psycopg.Connection[tuple[object, ...]], schema: str, name: str) -> None:
    """Statistics of the whole table, whose partitions have been looked at."""
    if conn.execute("SELECT to_regclass(%s)", [sql.Identifier(schema, name).as_string(conn)]).fetchone() != (None,):
        conn.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(schema, name)))
