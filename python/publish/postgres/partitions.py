"""Partitions of a scores table: which there are, and the short transactions that change them.

A reader that has planned its query before a partition is attached, and looks at the publications after, would miss the
new day; so each change takes the table exclusively, for as long as a few changes of the catalog last. It waits for
readers in short turns, between which others may read, so that a long query does not stop everybody else's.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg import sql

from headrace.errors import UserError
from headrace.publish.postgres.fencing import claim, make_fences
from headrace.publish.postgres.server import Connection
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
    """The partitions, of the table's schema, that hold these days."""
    # The bound is printed by the session's DateStyle.
    conn.execute("SET LOCAL datestyle = 'ISO, YMD'")
    rows = conn.execute(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p "
        "ON p.oid = i.inhparent JOIN pg_namespace n ON n.oid = p.relnamespace WHERE n.nspname = %s AND p.relname = %s "
        "AND pg_get_expr(c.relpartbound, c.oid) = ANY(%s)",
        [schema, name, [f"FOR VALUES IN ('{day}')" for day in days]],
    ).fetchall()
    return [str(row[0]) for row in rows]
