"""Step one, write: the day's scores go from Spark's executors into a staging table.

Each executor task sends its partition by `COPY`, in a transaction of its own. An advisory lock lets one attempt at a
partition write at a time, and each first removes what an earlier one left: a task that Spark repeats, or runs twice at
once (speculation), does not double rows. COPY, since it is what PostgreSQL
loads fastest from (the JDBC writer's batched INSERTs need a round trip for each batch and a plan for each row), and
from the executors, since the scores of all users need not fit the driver. The password reaches them inside the task,
as with Spark's JDBC writer: it is in no Spark property, plan, event log or command line.

A session-level advisory lock named after the staging table is held from before it is made until it is dropped. It
says that the table's run is alive: one whose lock is free belongs to a killed run, and the next run drops it.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from headrace.errors import UserError
from headrace.publish.postgres.server import Connection, Server, reason_of
from headrace.publish.postgres.tables import PARTITION, STAGING_PREFIX, ScoresTable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

log = logging.getLogger("headrace.publish")

#: Connections at once: enough to keep a server busy, few enough for anybody's limit.
_WRITERS = 8

_LOCK = "hashtextextended('headrace/' || %s, 0)"


@contextmanager
def staging_table(conn: Connection, table: ScoresTable, ds: str) -> Iterator[sql.Identifier]:
    """An empty staging table for the day, dropped at the end, whether that is good or bad.

    Raises:
        UserError: another process is publishing the same day of the same table.
    """
    name = table.staging(ds)
    if conn.execute(f"SELECT pg_try_advisory_lock({_LOCK})", [name]).fetchone() != (True,):
        raise UserError(f"another process is publishing {table.label} for {ds}: wait for it or stop it")
    try:
        _drop_orphans(conn, table.schema, name)
        staging = sql.Identifier(table.schema, name)
        # Without constraints: faulty scores are to get in and be found by the audit, which can say what is wrong.
        # Unlogged: it need not survive a crash of the server.
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(c.name), sql.SQL(c.type)) for c in table.columns
        )
        conn.execute(
            sql.SQL("CREATE UNLOGGED TABLE {} ({}, {} integer)").format(staging, columns, sql.Identifier(PARTITION))
        )
        try:
            yield staging
        finally:
            if not conn.closed:
                conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(staging))
    finally:
        if not conn.closed:
            conn.execute(f"SELECT pg_advisory_unlock({_LOCK})", [name])


def _drop_orphans(conn: Connection, schema: str, own: str) -> None:
    """Drop the staging tables whose runs are gone: those, and our own name's, whose lock can be had."""
    found = conn.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname, %s) "
        "AND pg_get_userbyid(c.relowner) = current_user",
        [schema, STAGING_PREFIX],
    ).fetchall()
    for (name,) in found:
        mine = name == own
        if mine or conn.execute(f"SELECT pg_try_advisory_lock({_LOCK})", [name]).fetchone() == (True,):
            conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(schema, name)))
            log.info("dropped %s.%s, left by a run that was killed", schema, name)
            if not mine:
                conn.execute(f"SELECT pg_advisory_unlock({_LOCK})", [name])


def copy_scores(df: DataFrame, server: Server, staging: sql.Identifier, table: ScoresTable) -> int:
    """Fill the staging table.

    Args:
        df: the scores, with the table's columns.
        server: reachable from the executors too.
        staging: an empty table of `staging_table`.
        table: names the columns.

    Returns:
        Rows sent.

    Raises:
        UserError: an executor could not reach the server, or the server did not take a row.
    """
    columns = [c.name for c in table.columns]

    def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        number = context.partitionId() if context else 0
        rows, fault = 0, ""
        try:
            rows = copy_partition(server, staging, table, number, batches)
        except psycopg.Error as e:
            fault = reason_of(e)
        yield pyarrow.RecordBatch.from_pydict({"rows": [rows], "fault": [fault]})

    sent = df.select(*columns).coalesce(_WRITERS).mapInArrow(send, "rows bigint, fault string").collect()
    faults = sorted({str(row["fault"]) for row in sent if row["fault"]})
    if faults:
        raise UserError(
            f"Spark's executors could not write the scores to {server}: {'; '.join(faults)}. The server must be "
            f"reachable from every executor (the embedded one is from this machine only: on a cluster set "
            f"publish.warehouse.kind=postgres)"
        )
    return sum(int(row["rows"]) for row in sent)


def copy_partition(
    server: Server, staging: sql.Identifier, table: ScoresTable, number: int, batches: Iterable[pa.RecordBatch]
) -> int:
    """Make `batches` the rows of one Spark partition in the staging table, whatever other attempts did or are doing.

    Args:
        server: the warehouse.
        staging: the staging table.
        table: names the columns.
        number: of the partition.
        batches: its rows, with the table's columns.

    Returns:
        Rows sent.

    Raises:
        psycopg.Error: the server cannot be reached, or did not take a row.
    """
    partition = sql.Identifier(PARTITION)
    delete = sql.SQL("DELETE FROM {} WHERE {} = %s").format(staging, partition)
    copy = sql.SQL("COPY {} ({}, {}) FROM STDIN (FORMAT csv)").format(staging, table.column_ids, partition)
    rows = 0
    with server.connect() as conn, conn.transaction(), conn.cursor() as cursor:
        # Without the lock, DELETE would not see what another attempt has not committed yet, and both would stay.
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 2))", [f"{staging.as_string()}/{number}"])
        cursor.execute(delete, [number])
        with cursor.copy(copy) as sink:
            for batch in batches:
                sink.write(as_csv(batch, number))
                rows += batch.num_rows
    return rows


def as_csv(batch: pa.RecordBatch, partition: int) -> memoryview:
    """A batch as CSV for COPY, with the partition's number as the last column.

    A null is an empty field and an empty string is `""`, which COPY tells apart. Floats are written with the fewest
    digits that read back as the same float.
    """
    import pyarrow
    from pyarrow import csv

    numbers = pyarrow.repeat(pyarrow.scalar(partition, pyarrow.int32()), batch.num_rows)
    whole = pyarrow.RecordBatch.from_arrays([*batch.columns, numbers], names=[*batch.schema.names, PARTITION])
    sink = io.BytesIO()
    csv.write_csv(whole, sink, csv.WriteOptions(include_header=False))
    return sink.getbuffer()
