"""Arrow tables appended to Delta tables without a Spark job: data files by Arrow, and one commit to the log."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from headrace.errors import UserError
from headrace.lake.delta.transaction import Transaction, TransactionOvertaken, create_table
from headrace.lake.delta.with_spark import broken_constraints, write_checkpoint
from headrace.lake.ingest.data_file import ROW_GROUP_ROWS, statistics
from headrace.storage import Fence, Location


def append(
    spark: SparkSession,
    table: Location,
    schema: pa.Schema,
    write: Callable[[], list[dict[str, Any]]],
    read: int | None,
    application: tuple[str, int],
    metadata: str,
    fence: Fence | None = None,
) -> int:
    """Append rows in one commit to a table without partitions, which is made where there is none.

    Data files that no commit names, of a process that was killed or refused, are VACUUM's to remove.

    Args:
        spark: the session, which is asked only where others have given the table constraints, and for checkpoints.
        table: its folder.
        schema: of the table.
        write: writes the rows into data files, or has done so: it gives what `data_file` did.
        read: the version of the table on which the rows rest; None: there was none.
        application: (its name, the last version that it had written then, -1 where none). The commit is its next one,
            and is refused where another of its commits came in between.
        metadata: the commit's userMetadata.
        fence: of the holder of the lease under which the table is written.

    Returns:
        The version that the commit made.

    Raises:
        TransactionOvertaken: since `read`, the application has written, the table itself was made or changed, or rows
            of it were removed.
        UserError: rows break a constraint that others have given the table; a table with partitions, or one that must
            not be written without Spark.
        LeaseLost: a later holder of the lease has committed.
    """
    if read is None:
        fields = from_arrow_schema(schema).jsonValue()["fields"]
        if not create_table(table, fields, (), write(), metadata, application, fence):
            raise TransactionOvertaken(f"{table} was made by another process meanwhile")
        return 0
    transaction = Transaction(table, read, fence)
    adds = write()
    if adds and transaction.constraints:
        frame = spark.read.parquet(*(str(table / add["path"]) for add in adds))
        for name, broken in broken_constraints(frame, transaction.constraints):
            raise UserError(
                f"{broken:,} rows break the constraint '{name}' of {table}; nothing of them was loaded. Drop the "
                f"constraint"
            )
    version = transaction.append(adds, metadata, application)
    if transaction.wants_checkpoint(version):
        write_checkpoint(spark, table)
    return version


def data_file(table: Location, rows: pa.Table) -> dict[str, Any]:
    """Write a data file, which is not of the table yet; its `add` action."""
    path = table / f"part-{uuid.uuid4()}.c000.snappy.parquet"
    metadata: list[Any] = []
    # Not waited for: the commit that names it has it on the disk before (headrace.lake.delta.transaction).
    with path.transient().new_file() as partial:
        pq.write_table(
            rows, partial, ROW_GROUP_ROWS, compression="snappy", store_schema=False, metadata_collector=metadata
        )
    info = path.info()
    nulls = {name: rows.column(name).null_count for name in rows.column_names}
    return {
        "path": path.name,
        "partitionValues": {},
        "size": info.size,
        "modificationTime": info.modified_ns // 1_000_000,
        "dataChange": True,
        "stats": statistics(metadata[0], rows.schema, nulls),
    }
