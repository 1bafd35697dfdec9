"""Step three, publish: one transaction makes the staged rows the day's rows. A reader sees the old ones or these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from psycopg import sql
from psycopg.types.json import Jsonb

from headrace.publish.postgres.server import Connection
from headrace.publish.postgres.tables import PUBLICATIONS, ScoresTable
from headrace.publish.target import Check


def swap(
    conn: Connection,
    staging: sql.Identifier,
    table: ScoresTable,
    ds: str,
    key: str,
    source: str,
    checks: Sequence[Check],
) -> int:
    """Replace the day's rows by the staged ones and record the publication; nothing or all of it.

    Args:
        conn: the warehouse, outside of a transaction.
        staging: audited rows; the table is dropped in the same transaction.
        table: where they go.
        ds: the day to replace.
        key: of the run, recorded.
        source: the Delta table and version that the rows came from, recorded.
        checks: what the audit found, recorded.

    Returns:
        Rows published.
    """
    with conn.transaction():
        # Also against writers that are not headrace and take the lock: the day is theirs or ours, never a mixture.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/' || %s, 1))", [f"{table.label}/{ds}"])
        model = conn.execute(sql.SQL("SELECT string_agg(DISTINCT model_version, ', ') FROM {}").format(staging))
        version = (model.fetchone() or ("",))[0] or ""
        conn.execute(sql.SQL("DELETE FROM {} WHERE ds = %s").format(table.id), [ds])
        # In key order: the day lies together in the heap, and the index is filled from left to right.
        rows = conn.execute(
            sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ORDER BY {}, rank").format(
                table.id, table.column_ids, table.column_ids, staging, sql.Identifier(table.user)
            )
        ).rowcount
        conn.execute(
            sql.SQL(
                "INSERT INTO {} (table_name, ds, key, rows, model, source, audit, published_at) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s, now()) ON CONFLICT (table_name, ds) DO UPDATE SET "
                "key = excluded.key, rows = excluded.rows, model = excluded.model, source = excluded.source, "
                "audit = excluded.audit, published_at = excluded.published_at"
            ).format(sql.Identifier(table.schema, PUBLICATIONS)),
            [table.name, ds, key, rows, version, source, Jsonb([asdict(check) for check in checks])],
        )
        conn.execute(sql.SQL("DROP TABLE {}").format(staging))
    return rows
