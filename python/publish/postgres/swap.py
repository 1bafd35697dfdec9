"""Step three, publish: the staged table becomes the day's partition. A reader sees the old day or the new one.

What takes time (scans for constraints, indexes, statistics) is done before, on a table that nobody else uses. The
transaction then changes a few rows of the catalog: the old partition is dropped, the staged table is attached, by a
CHECK that spares the scan, and the publication is recorded.

A reader that plans its query before a partition is attached, and reads the publications after, would miss the new day.
So each change takes the table exclusively, for as long as a few changes of the catalog last. It waits for readers in
short turns, between which others may read, so that a long query does not stop everybody else's.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from typing import TypeVar

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from headrace.errors import UserError
from headrace.publish.postgres.server import Connection
from headrace.publish.postgres.staging import PostgresStagedDay, drop_parts
from headrace.publish.postgres.tables import PUBLICATIONS, ScoresTable, claim, make_fences, required_columns
from headrace.publish.target import Check
from headrace.storage import Fence

log = logging.getLogger("headrace.publish")

T = TypeVar("T")

#: How long a turn waits for the table while readers queue behind it.
_TURN_MILLISECONDS = 1000
#: How long all turns together take.
_PATIENCE_SECONDS = 600.0

_TURNED_AWAY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


def change_held(conn: Connection, schema: str, name: str, change: Callable[[], T], fence: Fence | None = None) -> T:
    """Call `change` in one transaction that holds the partitioned table exclusively; nothing of it stays if it fails.

    Args:
        conn: the warehouse, outside of a transaction.
        schema: the table's schema.
        name: the table.
        change: short; called once in the transaction that is committed, and perhaps before in others that are not.
        fence: of the holder of the lease under which the table is written.

    Raises:
        UserError: readers held the table for ten minutes.
        LeaseLost: a later holder has been at work on the table; nothing was changed.
    """
    make_fences(conn, schema, fence)
    table = sql.Identifier(schema, name)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with conn.transaction():
                conn.execute(f"SET LOCAL lock_timeout = '{_TURN_MILLISECONDS} ms'")
                claim(conn, schema, name, fence)
                conn.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS EXCLUSIVE MODE").format(table))
                return change()
        except _TURNED_AWAY as e:
            if time.monotonic() > deadline:
                raise UserError(
                    f"queries have held {schema}.{name} for {_PATIENCE_SECONDS / 60:.0f} minutes, so its days could "
                    f"not be changed ({e.diag.message_primary}): see pg_stat_activity, and run the same command again"
                ) from None
            log.info("waiting for the readers of %s.%s", schema, name)
            time.sleep(random.uniform(0.2, 1.0))


def partitions_of(conn: Connection, schema: str, name: str, days: Sequence[str]) -> list[str]:
    """Return the partitions, of the table's schema, that hold these days."""
    # The bound is printed by the session's DateStyle.
    conn.execute("SET LOCAL datestyle = 'ISO, YMD'")
    rows = conn.execute(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p "
        "ON p.oid = i.inhparent JOIN pg_namespace n ON n.oid = p.relnamespace WHERE n.nspname = %s AND p.relname = %s "
        "AND pg_get_expr(c.relpartbound, c.oid) = ANY(%s)",
        [schema, name, [f"FOR VALUES IN ('{day}')" for day in days]],
    ).fetchall()
    return [str(row[0]) for row in rows]


def swap(
    conn: Connection,
    staged: PostgresStagedDay,
    table: ScoresTable,
    source: str,
    checks: Sequence[Check],
    fence: Fence | None = None,
) -> None:
    """Replace the day's partition by the staged table and record the publication; nothing or all of it.

    Args:
        conn: the warehouse, outside of a transaction.
        staged: audited rows; they are the partition afterwards.
        table: whose partition.
        source: the Delta table and version that the rows came from, recorded.
        checks: what the audit found, recorded.
        fence: of the holder of the lease under which the table is written.

    Raises:
        UserError: readers held the table for too long.
        LeaseLost: a later holder has been at work on the table; the day is as it was.
    """
    name = partition_name(table.name, staged.ds, staged.token)
    _make_like_a_partition(conn, staged, table, name)
    models = conn.execute(sql.SQL("SELECT string_agg(DISTINCT model_version, ', ') FROM {}").format(staged.id))
    model = (models.fetchone() or ("",))[0] or ""

    def change() -> None:
        # Also against writers that are not headrace and take the lock: the day is theirs or ours, never a mixture.
        conn.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('headrace/' || %s, 1))", [f"{table.label}/{staged.ds}"]
        )
        for old in partitions_of(conn, table.schema, table.name, [staged.ds]):
            conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(table.schema, old)))
        conn.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(staged.id, sql.Identifier(name)))
        conn.execute(
            sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES IN ({})").format(
                table.id, sql.Identifier(table.schema, name), sql.Literal(staged.ds)
            )
        )
        conn.execute(
            sql.SQL(
                "INSERT INTO {} (table_name, ds, key, rows, model, source, audit, published_at) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s, now()) ON CONFLICT (table_name, ds) DO UPDATE SET "
                "key = excluded.key, rows = excluded.rows, model = excluded.model, source = excluded.source, "
                "audit = excluded.audit, published_at = excluded.published_at"
            ).format(sql.Identifier(table.schema, PUBLICATIONS)),
            [table.name, staged.ds, staged.key, staged.rows, model, source, Jsonb([asdict(check) for check in checks])],
        )

    change_held(conn, table.schema, table.name, change, fence)


def partition_name(table: str, ds: str, token: str) -> str:
    """Return the name of a day's partition: table, day, and which attempt at it.

    It leaves room for `_pkey` in 63 bytes.
    """
    return f"{table[:39]}_{date.fromisoformat(ds):%Y%m%d}_{token}"


def _make_like_a_partition(conn: Connection, staged: PostgresStagedDay, table: ScoresTable, name: str) -> None:
    """Give the staged table what the partitioned one asks of its parts, so that attaching it looks at no row."""
    drop_parts(conn, staged)
    day = sql.SQL("ALTER TABLE {} ADD CHECK (ds = {})").format(staged.id, sql.Literal(date.fromisoformat(staged.ds)))
    required = [
        sql.SQL("ALTER COLUMN {} SET NOT NULL").format(sql.Identifier(n))
        for n in required_columns(conn, table.schema, table.name)
    ]
    conn.execute(sql.SQL(", ").join([day, *required]))
    conn.execute(
        sql.SQL("ALTER TABLE {} ADD CONSTRAINT {} PRIMARY KEY ({})").format(
            staged.id, sql.Identifier(f"{name}_pkey"), table.key
        )
    )
    # Indexes that people have added to the table: attaching would build them while everybody waits.
    for (definition,) in conn.execute(
        "SELECT pg_get_indexdef(x.indexrelid) FROM pg_index x JOIN pg_class c ON c.oid = x.indrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s AND NOT x.indisprimary",
        [table.schema, table.name],
    ).fetchall():
        head, _, tail = str(definition).partition(" USING ")
        unique = sql.SQL("UNIQUE " if head.startswith("CREATE UNIQUE") else "")
        conn.execute(sql.SQL("CREATE {}INDEX ON {} USING {}").format(unique, staged.id, sql.SQL(tail)))
    conn.execute(sql.SQL("ANALYZE {}").format(staged.id))


def drop_days(conn: Connection, table: tuple[str, str], days: Sequence[str], fence: Fence | None = None) -> None:
    """Drop the partitions of days and their publications in one short transaction.

    Args:
        conn: the warehouse, outside of a transaction.
        table: its schema and name.
        days: which.
        fence: see `swap`.
    """
    schema, name = table

    def change() -> None:
        for old in partitions_of(conn, schema, name, days):
            conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(schema, old)))
        conn.execute(
            sql.SQL("DELETE FROM {} WHERE table_name = %s AND ds = ANY(%s)").format(
                sql.Identifier(schema, PUBLICATIONS)
            ),
            [name, [date.fromisoformat(day) for day in days]],
        )

    change_held(conn, schema, name, change, fence)
