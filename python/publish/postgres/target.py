"""PostgreSQL as the target of a day's scores: staging, audit, a swap in one transaction, grants and erasure."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from headrace.config import Score, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.databases import failures, reason_of_postgres
from headrace.publish.postgres import publication, tables
from headrace.publish.postgres.embedded import erased_from_files, is_unfinished
from headrace.publish.postgres.server import Connection, Server, connect_to, serve
from headrace.publish.postgres.tables import PUBLICATIONS, ScoresTable, claim_in_time, columns_of, make_fences
from headrace.publish.target import Check, Key, KeyLimits, Publication, StagedDay, Target, table_name
from headrace.stage import RunLock
from headrace.storage import Fence

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def count_rows_with(conn: Connection, schema: str, name: str, column: str, keys: Sequence[Key]) -> dict[str, int]:
    """Count by day the rows with one of these keys in a column."""
    if column not in columns_of(conn, schema, name):
        return {}
    counted = sql.SQL("SELECT ds, count(*) FROM {} WHERE {} = ANY(%s) GROUP BY ds ORDER BY ds")
    rows = conn.execute(counted.format(sql.Identifier(schema, name), sql.Identifier(column)), [list(keys)])
    return {day.isoformat(): int(count) for day, count in rows.fetchall()}


def erase_rows(
    conn: Connection, schema: str, name: str, column: str, keys: Sequence[Key], fence: Fence | None = None
) -> None:
    """Remove them. Readers see all of them or none; then VACUUM frees their space.

    What the server's write-ahead log, its backups and its replicas hold is theirs to let go.
    """
    table, key_column = sql.Identifier(schema, name), sql.Identifier(column)
    make_fences(conn, schema, fence)
    with conn.transaction():
        claim_in_time(conn, schema, name, fence)
        deletion = sql.SQL(
            "WITH gone AS (DELETE FROM {} WHERE {} = ANY(%s) RETURNING ds) SELECT ds, count(*) FROM gone GROUP BY ds"
        )
        days: list[tuple[date, int]] = conn.execute(deletion.format(table, key_column), [list(keys)]).fetchall()
        for day, count in days:
            conn.execute(
                sql.SQL("UPDATE {} SET rows = rows - %s WHERE table_name = %s AND ds = %s").format(
                    sql.Identifier(schema, PUBLICATIONS)
                ),
                [count, name, day],
            )
    conn.execute(sql.SQL("VACUUM ANALYZE {}").format(table))


#: One row for each (table, privilege, role) that was granted; for USAGE of the schema, the table is ''.
GRANTS = "headrace_grants"

_USAGE = ("", "usage")


def set_grants(
    conn: Connection, table: ScoresTable, grants: Mapping[str, Sequence[str]], fence: Fence | None = None
) -> None:
    """Make these the rights that we have given on the table and its view, and to use the schema; all, or none of it.

    Rights that others have given, or that were given before they were recorded, stay. A role's use of the schema is
    taken back with the last of its rights there, if it did not have it before the first.

    Args:
        conn: the warehouse.
        table: which; it is there, and its view.
        grants: privilege -> roles, as `publish.grants`.
        fence: of the holder of the lease under which the table is written.

    Raises:
        BusyError: a transaction of another run holds the table's row of `headrace_fences`.
        LeaseLost: a later holder has been at work on the table; nothing was changed.
    """
    requested = {(privilege, role) for privilege, roles in grants.items() for role in roles}
    record, schema = sql.Identifier(table.schema, GRANTS), sql.Identifier(table.schema)
    make_fences(conn, table.schema, fence)
    with conn.transaction():
        claim_in_time(conn, table.schema, table.name, fence)
        # One at a time: pipelines share the record and the schema. Taken after the row's lock, so that a run that waits
        # for its row blocks no other.
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('headrace/tables', 0))")
        if not columns_of(conn, table.schema, GRANTS):
            if not requested:
                return
            conn.execute(
                sql.SQL(
                    "CREATE TABLE {} (table_name text, privilege text, role text, "
                    "PRIMARY KEY (table_name, privilege, role))"
                ).format(record)
            )
        recorded = conn.execute(
            sql.SQL("SELECT privilege, role FROM {} WHERE table_name = %s").format(record), [table.name]
        )
        granted = {(str(privilege), str(role)) for privilege, role in recorded.fetchall()}

        def note(statement: str, name: str, privilege: str, role: str) -> None:
            conn.execute(sql.SQL(statement).format(record), [name, privilege, role])

        add = "INSERT INTO {} VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
        remove = "DELETE FROM {} WHERE table_name = %s AND privilege = %s AND role = %s"
        for privilege, role in sorted(granted - requested):
            note(remove, table.name, privilege, role)
            if conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
                continue
            conn.execute(
                sql.SQL("REVOKE {} ON {}, {} FROM {}").format(
                    sql.SQL(privilege.upper()), table.id, table.current_id, sql.Identifier(role)
                )
            )
            left = conn.execute(
                sql.SQL("SELECT array_agg(table_name) FROM {} WHERE role = %s").format(record), [role]
            ).fetchone()
            # The role has no other right in the schema, and is to get none.
            if left == ([""],) and role not in {r for _, r in requested}:
                note(remove, *_USAGE, role)
                conn.execute(sql.SQL("REVOKE USAGE ON SCHEMA {} FROM {}").format(schema, sql.Identifier(role)))
        for privilege, role in sorted(requested):
            note(add, table.name, privilege, role)
            uses = conn.execute("SELECT has_schema_privilege(%s, %s, 'USAGE')", [role, table.schema]).fetchone()
            if uses != (True,):
                note(add, *_USAGE, role)
                conn.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schema, sql.Identifier(role)))
            conn.execute(
                sql.SQL("GRANT {} ON {}, {} TO {}").format(
                    sql.SQL(privilege.upper()), table.id, table.current_id, sql.Identifier(role)
                )
            )


log = logging.getLogger("headrace.publish")


@contextmanager
def open_postgres(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    assert spec.publish is not None
    assert spec.score is not None, "config refuses publish without score"
    conf = spec.publish.warehouse
    with serve(conf, ws) as server, connect_to(server, conf) as conn:
        address = "embedded" if conf.kind == "embedded" else f"{server.user}@{server}"
        description, label = f"the warehouse {server} of {spec.pipeline}", f"{conf.schema_name}.{table_name(spec)}"
        with failures(psycopg.Error, description, label, reason_of=reason_of_postgres):
            fence = lock.fence if lock else None
            # Rows must also leave the files of a server that headrace runs.
            folder = ws.postgres if conf.kind == "embedded" else None
            yield PostgresTarget(server, conn, address, conf.schema_name, table_name(spec), spec.score, fence, folder)


class PostgresTarget(Target):
    """A scores table in PostgreSQL, partitioned by day."""

    kind = "postgres"

    def __init__(
        self,
        server: Server,
        conn: Connection,
        address: str,
        schema: str,
        name: str,
        score: Score,
        fence: Fence | None = None,
        folder: Path | None = None,
    ) -> None:
        self.address = address
        self._fence, self._folder = fence, folder
        self.label = f"{schema}.{name}"
        self._server, self._conn = server, conn
        self._schema, self._name, self._score = schema, name, score
        self._table = tables.ScoresTable(schema, name, score.user.key, score.item.key, ())

    def claim(self) -> None:
        if self._fence is not None:
            # Before the table exists, too: a paused run may be about to make the first publication.
            tables.make_schema(self._conn, self._schema)
            make_fences(self._conn, self._schema, self._fence)
            with self._conn.transaction():
                claim_in_time(self._conn, self._schema, self._name, self._fence)

    def key_limits(self, column: str) -> KeyLimits:
        # The user is part of the primary key. An entry of PostgreSQL's B-tree has at most a third of a page, 2,704
        # bytes, which the day, the rank and headers share.
        return KeyLimits(max_bytes=2_600 if column == self._score.user.key else None, nul=False)

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        self._table = tables.scores_table(
            self._schema, self._name, self._score.user.key, self._score.item.key, spark_types
        )
        tables.create_tables(self._conn, self._table, self._fence)

    @contextmanager
    def stage(self, df: DataFrame, ds: str, key: str) -> Iterator[StagedDay]:
        with publication.staging_table(self._conn, self._table, ds, key) as staged:
            tick = time.perf_counter()
            sent = publication.copy_scores(df, self._server, staged, self._table)
            log.info("staged %s rows in %.1f s", f"{sent:,}", time.perf_counter() - tick)
            yield staged

    def swap(self, staged: StagedDay, source: str, checks: Sequence[Check]) -> None:
        assert isinstance(staged, publication.PostgresStagedDay), "of stage()"
        publication.swap(self._conn, staged, self._table, source, checks, self._fence)

    def keep(self, staged: StagedDay) -> None:
        assert isinstance(staged, publication.PostgresStagedDay), "of stage()"
        publication.keep(self._conn, staged)

    def kept_labels(self, days: Sequence[str] | None = None) -> list[str]:
        return [f"{self._schema}.{name}" for name in publication.kept_tables(self._conn, self._table, days)]

    def drop_kept(self, days: Sequence[str] | None = None) -> list[str]:
        return publication.drop_kept(self._conn, self._table, days)

    def published(self, ds: str) -> Publication | None:
        return tables.published(self._conn, self._schema, self._name, ds)

    def days(self) -> list[str]:
        return list(tables.published_days(self._conn, self._schema, self._name))

    def count(self, ds: str) -> int:
        return tables.count_day(self._conn, self._schema, self._name, ds)

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        if not tables.columns_of(self._conn, self._schema, self._name):
            raise UserError(f"there is no table {self.label} yet")
        return tables.sample(self._conn, self._schema, self._name, ds, rows)

    def drop_days(self, days: Sequence[str]) -> None:
        if days:
            publication.drop_days(self._conn, (self._schema, self._name), days, self._fence)

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        return int(self._folder is not None and is_unfinished(self._folder))

    @property
    def not_reached(self) -> str:
        if self._folder is not None:
            return ""
        return f"the write-ahead log, statistics, backups and replicas of the server {self._server} are not headrace's"

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        return count_rows_with(self._conn, self._schema, self._name, column, keys)

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        files = (
            nullcontext()
            if self._folder is None
            else erased_from_files(self._folder, self._server.port, self._server.database, self._schema, self._name)
        )
        with files:
            erase_rows(self._conn, self._schema, self._name, column, keys, self._fence)
        return ""

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        set_grants(self._conn, self._table, grants, self._fence)
