"""Publication of a day's scores: a staging table, which becomes the day's partition once it is audited.

*Write.* The scores go from Spark's executors into a table that later becomes the day's partition. Each executor task
sends its partition by `COPY`, in a transaction of its own that also notes the partition as sent. An advisory lock lets
one attempt at a partition write at a time, and an attempt that finds it noted writes nothing: a task that Spark
repeats, or runs twice at once (speculation), does not double rows. COPY is what PostgreSQL loads fastest from (the JDBC
writer's batched INSERTs need a round trip for each batch and a plan for each row). The scores of all users need not
fit the driver. The password reaches executors inside the task: no Spark property, plan, event log or command line has
it.

A session-level advisory lock named after the table and the day is held from before the staging table is made until it
is dropped, swapped or kept. It says that the run is alive: where it is free, staging tables of the day belong to
killed runs, and the next run drops them. Each run's staging table has a name of its own, so that a task that outlives
its killed run cannot write into another's. One that was kept for a look stays until the day is staged again.

*Publish.* A reader sees the old day or the new one. What takes time (scans for constraints, indexes, statistics) is
done before the swap, on a table that nobody else uses. The transaction then changes a few rows of the catalog: the old
partition is dropped, the staged table is attached, by a CHECK that spares the scan, and the publication is recorded.

A reader that plans its query before a partition is attached, and reads the publications after, would miss the new day.
So each change takes the table exclusively, for as long as a few changes of the catalog last. It waits for readers in
short turns, between which others may read, so that a long query does not stop everybody else's.
"""

from __future__ import annotations

import io
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from headrace.config.schema import column
from headrace.errors import BusyError, UserError
from headrace.errors.databases import reason_of_postgres
from headrace.publish.postgres.server import Connection, Server
from headrace.publish.postgres.tables import (
    PUBLICATIONS,
    STAGING_PREFIX,
    ScoresTable,
    claim,
    columns_of,
    make_fences,
    published_days,
    required_columns,
)
from headrace.publish.target import Check, PublishedDay
from headrace.storage import Fence

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


log = logging.getLogger("headrace.publish")

#: Connections at once: enough to keep a server busy, few enough for anybody's limit.
_WRITERS = 8

#: Start of the comment of a staging table that is kept for inspection.
_KEPT_MARK = "kept by headrace"
#: Suffix of the table that notes which partitions were sent.
_PARTS = "_parts"

_LOCK = "hashtextextended('headrace/' || %s, 0)"


@dataclass
class PostgresStagedDay:
    """A staging table; see `headrace.publish.target.StagedDay`."""

    conn: Connection
    schema: str
    name: str
    ds: str
    key: str
    previous: PublishedDay | None
    #: The label of the table that they are for.
    table: str
    rows: int = 0
    is_kept: bool = False

    @property
    def id(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def parts(self) -> sql.Identifier:
        """The Spark partitions that were sent: their numbers and rows."""
        return sql.Identifier(self.schema, self.name + _PARTS)

    @property
    def token(self) -> str:
        """Tells this attempt at the day from others."""
        return self.name.rpartition("_")[2]

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def relation(self) -> str:
        return self.id.as_string(self.conn)

    @property
    def day(self) -> str:
        return f"DATE '{self.ds}'"

    def quote(self, name: str) -> str:
        return sql.Identifier(name).as_string(self.conn)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        return self.conn.execute(text.encode()).fetchall()


@contextmanager
def staging_table(conn: Connection, table: ScoresTable, ds: str, key: str) -> Iterator[PostgresStagedDay]:
    """Give an empty staging table for the day, dropped at the end unless it was swapped or kept.

    Raises:
        BusyError: another process is publishing the same day of the same table.
    """
    prefix = table.staging(ds)
    if conn.execute(f"SELECT pg_try_advisory_lock({_LOCK})", [prefix]).fetchone() != (True,):
        raise BusyError(f"another process is publishing {table.label} for {ds}: wait for it or stop it")
    try:
        _drop_orphans(conn, table.schema, prefix)
        staged = PostgresStagedDay(
            conn, table.schema, f"{prefix}_{uuid.uuid4().hex[:8]}", ds, key, _previous(conn, table, ds), table.label
        )
        # Without constraints, so that the audit sees faulty scores and names the fault. With all columns of the table,
        # in its order, even those that the scores no longer have.
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(t))
            for n, t in columns_of(conn, table.schema, table.name).items()
        )
        with conn.transaction():
            conn.execute(sql.SQL("CREATE TABLE {} ({})").format(staged.id, columns))
            conn.execute(
                sql.SQL("CREATE TABLE {} (number integer PRIMARY KEY, rows bigint NOT NULL)").format(staged.parts)
            )
        try:
            yield staged
        finally:
            if not conn.closed:
                drop_parts(conn, staged)
                if not staged.is_kept:
                    # After the swap the table is the partition, under another name.
                    conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(staged.id))
    finally:
        if not conn.closed:
            conn.execute(f"SELECT pg_advisory_unlock({_LOCK})", [prefix])


def drop_parts(conn: Connection, staged: PostgresStagedDay) -> None:
    """Drop the note of what was sent: nothing more will be."""
    conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(staged.parts))


def keep(conn: Connection, staged: PostgresStagedDay) -> None:
    """Leave a staging table for a look."""
    conn.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(staged.id, sql.Literal(_kept_comment(staged.table))))
    staged.is_kept = True


def kept_tables(conn: Connection, table: ScoresTable, days: Sequence[str] | None = None) -> list[str]:
    """Return the names of this table's staging tables (of these days) that were kept."""
    rows = conn.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s "
        "AND obj_description(c.oid, 'pg_class') = %s AND NOT c.relispartition ORDER BY 1",
        [table.schema, _kept_comment(table.label)],
    ).fetchall()
    starts = None if days is None else tuple(table.staging(day) for day in days)
    return [str(name) for (name,) in rows if starts is None or str(name).startswith(starts)]


def drop_kept(conn: Connection, table: ScoresTable, days: Sequence[str] | None = None) -> list[str]:
    """Drop them. Returns their labels."""
    names = kept_tables(conn, table, days)
    for name in names:
        conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table.schema, name)))
    return [f"{table.schema}.{name}" for name in names]


def _kept_comment(label: str) -> str:
    """Return the comment of a kept staging table: whose it is."""
    return f"{_KEPT_MARK}: rows for {label} that failed their audit"


def _previous(conn: Connection, table: ScoresTable, ds: str) -> PublishedDay | None:
    earlier_days = [(day, rows) for day, rows in published_days(conn, table.schema, table.name).items() if day < ds]
    if not earlier_days:
        return None
    day, rows = earlier_days[-1]
    of_day = sql.SQL("(SELECT * FROM {} WHERE ds = {}) AS previous").format(
        table.id, sql.Literal(date.fromisoformat(day))
    )
    return PublishedDay(day, rows, of_day.as_string(conn))


def _drop_orphans(conn: Connection, schema: str, own_prefix: str) -> list[str]:
    """Drop the staging tables whose runs are gone: those, and our own day's, whose lock can be had. Kept ones stay."""
    rows = conn.execute(
        "SELECT c.relname, coalesce(obj_description(c.oid, 'pg_class') LIKE %s, false) FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname, %s) "
        "AND pg_get_userbyid(c.relowner) = current_user AND NOT c.relispartition",
        [f"{_KEPT_MARK}%", schema, STAGING_PREFIX],
    ).fetchall()
    dropped = []
    for name, is_kept in rows:
        lock = name[: len(own_prefix)]
        is_own = lock == own_prefix
        if is_own or (
            not is_kept and conn.execute(f"SELECT pg_try_advisory_lock({_LOCK})", [lock]).fetchone() == (True,)
        ):
            conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(schema, name)))
            log.info("dropped %s.%s, left by an earlier run", schema, name)
            dropped.append(f"{schema}.{name}")
            if not is_own:
                conn.execute(f"SELECT pg_advisory_unlock({_LOCK})", [lock])
    return dropped


def copy_scores(df: DataFrame, server: Server, staged: PostgresStagedDay, table: ScoresTable) -> int:
    """Fill the staging table.

    Args:
        df: the scores, with the table's columns.
        server: reachable from the executors too.
        staged: an empty table of `staging_table`; its `rows` are set.
        table: names the columns.

    Returns:
        Rows sent.

    Raises:
        UserError: an executor could not reach the server, or the server did not take a row.
    """
    columns = [c.name for c in table.columns]
    place, parts = staged.id, staged.parts

    def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        number = context.partitionId() if context else 0
        rows, fault, is_away = 0, "", False
        try:
            rows = copy_partition(server, place, parts, columns, number, batches)
        except psycopg.Error as e:
            fault, is_away = reason_of_postgres(e), isinstance(e, psycopg.OperationalError)
        yield pyarrow.RecordBatch.from_pydict({"rows": [rows], "fault": [fault], "is_away": [is_away]})

    report = "rows bigint, fault string, is_away boolean"
    # Columns are numbered: Spark takes a dot in a column's name for the separator of a field.
    rows = df.select(*(column(name).alias(f"c{i}") for i, name in enumerate(columns)))
    sent = rows.coalesce(_WRITERS).mapInArrow(send, report).collect()
    faults = sorted({str(row["fault"]) for row in sent if row["fault"]})
    if faults:
        advice = f"{table.label} holds what it held before"
        if any(row["is_away"] for row in sent):
            advice = (
                "The server must be reachable from every executor (the embedded one is from this machine only: on a "
                "cluster set publish.warehouse.kind=postgres)"
            )
        raise UserError(f"Spark's executors could not write the scores to {server}: {'; '.join(faults)}. {advice}")
    staged.rows = sum(int(row["rows"]) for row in sent)
    return staged.rows


def copy_partition(
    server: Server,
    staging: sql.Identifier,
    parts: sql.Identifier,
    columns: Sequence[str],
    number: int,
    batches: Iterable[pa.RecordBatch],
) -> int:
    """Make `batches` the rows of one Spark partition in the staging table, whatever other attempts did or are doing.

    Args:
        server: the warehouse.
        staging: the staging table.
        parts: the table that notes the partitions that were sent.
        columns: names of the batches' columns.
        number: of the partition.
        batches: its rows.

    Returns:
        Rows of the partition in the staging table.

    Raises:
        psycopg.Error: the server cannot be reached, or did not take a row.
    """
    copy = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
        staging, sql.SQL(", ").join(sql.Identifier(n) for n in columns)
    )
    rows = 0
    with server.connect() as conn, conn.transaction(), conn.cursor() as cursor:
        # Without the lock, an attempt would not see what another one has not committed yet, and both would write.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 2))", [f"{staging.as_string()}/{number}"])
        done = cursor.execute(sql.SQL("SELECT rows FROM {} WHERE number = %s").format(parts), [number]).fetchone()
        if done is not None:
            return int(done[0])
        with cursor.copy(copy) as sink:
            for batch in batches:
                sink.write(as_csv(batch))
                rows += batch.num_rows
        cursor.execute(sql.SQL("INSERT INTO {} VALUES (%s, %s)").format(parts), [number, rows])
    return rows


def as_csv(batch: pa.RecordBatch) -> memoryview:
    """Return a batch as CSV for COPY.

    A null is an empty field and an empty string is `""`, which COPY tells apart. Floats are written with the fewest
    digits that read back as the same float.
    """
    from pyarrow import csv

    sink = io.BytesIO()
    csv.write_csv(batch, sink, csv.WriteOptions(include_header=False))
    return sink.getbuffer()


T = TypeVar("T")

#: Longest wait for the table in one turn, while readers queue behind it.
_TURN_MILLISECONDS = 1000
#: Longest wait of all turns together.
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
        # Writers other than headrace may take this lock, too: the day is then theirs or ours, never a mixture.
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
