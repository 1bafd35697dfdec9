"""Arrow tables appended to Delta tables without a Spark job: data files by Arrow, a transaction of Delta's own."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from headrace.errors import UserError
from headrace.lake.ingest.data_file import ROW_GROUP_ROWS, statistics
from headrace.storage import Location


class TransactionOvertaken(Exception):
    """The application has committed since the table was read."""


def append(
    spark: SparkSession,
    table: Location,
    rows: pa.Table,
    transaction: tuple[str, int],
    metadata: str,
    properties: Mapping[str, str],
    rows_a_file: int,
) -> int:
    """Append rows in one commit to a table without partitions, which is made where there is none.

    Data files that no commit names, of a process that was killed or refused, are VACUUM's to remove.

    Args:
        spark: the session.
        table: its folder.
        rows: of the table's columns.
        transaction: (name of an application, the last version that it wrote, -1 where none). The commit is its next
            one, and is refused where another of its commits came in between.
        metadata: the commit's userMetadata.
        properties: of a new table, besides the session's defaults.
        rows_a_file: most rows of a data file.

    Returns:
        The version that the commit made.

    Raises:
        TransactionOvertaken: the application has written a version after the one given.
        UserError: rows break a constraint that others have given the table, or it has column mapping.
        Py4JError: Delta refused the commit.
    """
    jvm: Any = spark._jvm
    delta = jvm.org.apache.spark.sql.delta
    application, last = transaction
    begun = delta.DeltaLog.forTable(spark._jsparkSession, str(table)).startTransaction()
    # To ask for it makes the commit depend on it.
    if begun.txnVersion(application) > last:
        raise TransactionOvertaken(f"{application} has written to {table} since it was read")
    action = delta.actions.Action.fromJson
    now = int(time.time() * 1000)
    if begun.readVersion() < 0:
        described = {
            "id": str(uuid.uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": from_arrow_schema(rows.schema).json(),
            "partitionColumns": [],
            "configuration": dict(properties),
            "createdTime": now,
        }
        begun.updateMetadata(action(json.dumps({"metaData": described})), False)
    found = json.loads(begun.metadata().json())["metaData"]
    if found["configuration"].get("delta.columnMapping.mode", "none") != "none":
        raise UserError(f"{table} has column mapping, and headrace writes columns by their own names; turn it off")
    written = [_data_file(table, rows.slice(start, rows_a_file)) for start in range(0, rows.num_rows, rows_a_file)]
    _check(spark, table, found, [str(table / file["path"]) for file in written])
    actions = [{"add": file} for file in written]
    actions.append({"txn": {"appId": application, "version": last + 1, "lastUpdated": now}})
    write = getattr(jvm, "org.apache.spark.sql.delta.DeltaOperations$Write")
    none = jvm.scala.Option.empty()
    operation = write(jvm.org.apache.spark.sql.SaveMode.Append, none, none, jvm.scala.Some(metadata))
    return int(begun.commit(_sequence(jvm, [action(json.dumps(a)) for a in actions]), operation))


def _data_file(table: Location, rows: pa.Table) -> dict[str, Any]:
    """Write a data file; the `add` action of it."""
    path = table / f"part-{uuid.uuid4()}.c000.snappy.parquet"
    metadata: list[Any] = []
    # As Spark's writers: not waited for.
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


def _check(spark: SparkSession, table: Location, metadata: Mapping[str, Any], files: Sequence[str]) -> None:
    """What Delta checks where Spark writes: constraints that others have given the table.

    Args:
        metadata: the transaction's `metaData` action.
        files: to be added.

    Raises:
        UserError: rows break one.
    """
    fields = json.loads(metadata["schemaString"])["fields"]
    checks = {k: v for k, v in metadata["configuration"].items() if k.startswith("delta.constraints.")}
    checks |= {f"{f['name']} is not null": f"`{f['name']}` IS NOT NULL" for f in fields if not f["nullable"]}
    for name, text in checks.items() if files else ():
        broken = spark.read.parquet(*files).where(~F.coalesce(F.expr(text), F.lit(False))).count()
        if broken:
            raise UserError(
                f"{broken:,} rows break the constraint '{name.removeprefix('delta.constraints.')}' of {table}; nothing "
                f"of them was loaded. Drop the constraint"
            )


def _sequence(jvm: Any, items: Sequence[Any]) -> Any:
    listed = jvm.java.util.ArrayList()
    for item in items:
        listed.add(item)
    return jvm.scala.jdk.javaapi.CollectionConverters.asScala(listed).toSeq()
