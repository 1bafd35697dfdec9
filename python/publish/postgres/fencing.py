"""Fencing of commits to a scores table: a row for each lease has the token of its newest holder.

The row is raised in the transaction that it guards, which holds it until its end: whoever comes with a larger token
waits, and whoever comes with a smaller one afterwards is refused with all that its transaction has done.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

from headrace.errors import BusyError
from headrace.publish.postgres.server import Connection
from headrace.publish.target import lease_lost
from headrace.storage import Fence

#: One row for each (table, lease).
FENCES = "headrace_fences"
#: How long a row is waited for, where nothing else says so.
_WAIT_SECONDS = 60


def make_fences(conn: Connection, schema: str, fence: Fence | None) -> None:
    """Make the table of tokens where there is none; call it before the transaction locks anything else."""
    if fence is None:
        return
    existing = conn.execute("SELECT to_regclass(format('%%I.%%I', %s::text, %s::text))", [schema, FENCES]).fetchone()
    if existing != (None,):
        return
    with conn.transaction():
        # IF NOT EXISTS of two sessions at once can still collide in the catalog: one at a time.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        conn.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {} (table_name text, lease text, token bigint NOT NULL, "
                "claimed_at timestamp with time zone NOT NULL, PRIMARY KEY (table_name, lease))"
            ).format(sql.Identifier(schema, FENCES))
        )


def claim(conn: Connection, schema: str, name: str, fence: Fence | None) -> None:
    """Note a holder's token for a table; the first statement of the transaction that changes it.

    First, so that all take the row before they take the table: none waits for another that waits for it.

    Args:
        conn: the warehouse, in a transaction, after `make_fences`.
        schema: the table's schema.
        name: the table.
        fence: of the holder; None: there is no lease.

    Raises:
        LeaseLost: a later holder has been here.
    """
    if fence is None:
        return
    record = sql.Identifier(schema, FENCES)
    claimed = conn.execute(
        sql.SQL(
            "INSERT INTO {} AS f (table_name, lease, token, claimed_at) VALUES (%s, %s, %s, now()) "
            "ON CONFLICT (table_name, lease) DO UPDATE SET token = excluded.token, claimed_at = excluded.claimed_at "
            "WHERE f.token <= excluded.token RETURNING token"
        ).format(record),
        [name, fence.lease, fence.token],
    ).fetchone()
    if claimed is None:
        raise lease_lost(f"{schema}.{name}")


def claim_in_time(conn: Connection, schema: str, name: str, fence: Fence | None) -> None:
    """Claim in a transaction without a `lock_timeout` of its own: the wait for the row is limited.

    Call it before the transaction takes a lock that other pipelines want.

    Raises:
        BusyError: a transaction of another run holds the row for a minute: its client may stand still.
        LeaseLost: a later holder has been here.
    """
    if fence is None:
        return
    conn.execute(f"SET LOCAL lock_timeout = '{_WAIT_SECONDS} s'")
    try:
        claim(conn, schema, name, fence)
    except psycopg.errors.LockNotAvailable:
        raise BusyError(
            f"another run is changing {schema}.{name} and has held its row in {FENCES} for {_WAIT_SECONDS} s: wait for "
            f"it, or end its session (pg_stat_activity, application headrace)"
        ) from None
    conn.execute("SET LOCAL lock_timeout TO DEFAULT")
