"""Commits of data files that are there already: transactions of Delta's own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from headrace.errors import UserError
from headrace.lake.ingest.data_file import WrittenFile, ddl_fields
from headrace.lake.ingest.tables import SKIP_EMPTY
from headrace.lake.session import spark_settings
from headrace.storage import Location


def commit_files(
    spark: SparkSession,
    table: Location,
    days: Sequence[str],
    files: Sequence[WrittenFile],
    metadata: str,
    columns: str = "",
) -> None:
    """Replace the days' partitions by data files, in one commit: also where there are none, and were none.

    A transaction of Delta's own: it is refused where another writer changed these days meanwhile.

    Args:
        spark: the session.
        table: its folder.
        days: ISO days.
        files: of these days, in the table's folder.
        metadata: the commit's userMetadata.
        columns: that the table has afterwards, in Spark's DDL; those that it lacks are added.

    Raises:
        UserError: rows break a constraint that others have given the table.
    """
    jvm: Any = spark._jvm
    delta = jvm.org.apache.spark.sql.delta
    session = spark._jsparkSession
    predicate = "ds IN ({})".format(", ".join(f"'{date.fromisoformat(ds).isoformat()}'" for ds in days))
    transaction = delta.DeltaLog.forTable(session, str(table)).startTransaction()
    described = json.loads(transaction.metadata().json())["metaData"]
    _check(spark, table, described, files)
    if columns:
        _add_columns(jvm, transaction, described, ddl_fields(columns))
    parsed = session.sessionState().sqlParser().parseExpression(predicate)
    live = transaction.filterFiles(_sequence(jvm, [parsed]), False)
    now = int(time.time() * 1000)
    actions = [live.apply(i).removeWithTimestamp(now, True) for i in range(live.size())]
    actions += [delta.actions.Action.fromJson(f.add_action()) for f in files]
    write = getattr(jvm, "org.apache.spark.sql.delta.DeltaOperations$Write")
    some = jvm.scala.Some
    operation = write(
        jvm.org.apache.spark.sql.SaveMode.Overwrite, jvm.scala.Option.empty(), some(predicate), some(metadata)
    )
    with spark_settings(spark, {SKIP_EMPTY: "false"}):
        transaction.commit(_sequence(jvm, actions), operation)


def _check(spark: SparkSession, table: Location, metadata: Mapping[str, Any], files: Sequence[WrittenFile]) -> None:
    """What Delta checks where Spark writes: constraints that others have given the table.

    Raises:
        UserError: rows break one, or the table's columns have other names in its files.
    """
    configuration = metadata["configuration"]
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        raise UserError(f"{table} has column mapping, and ingest writes columns by their own names; turn it off")
    fields = json.loads(metadata["schemaString"])["fields"]
    checks = {k: v for k, v in configuration.items() if k.startswith("delta.constraints.")}
    checks |= {f"{f['name']} is not null": f"`{f['name']}` IS NOT NULL" for f in fields if not f["nullable"]}
    if not checks:
        return
    for ds in sorted({f.ds for f in files}):
        paths = [str(table / f.path) for f in files if f.ds == ds]
        rows = spark.read.parquet(*paths).withColumn("ds", F.lit(ds))
        for name, text in checks.items():
            broken = rows.where(~F.coalesce(F.expr(text), F.lit(False))).count()
            if broken:
                raise UserError(
                    f"{broken:,} rows of {ds} break the constraint '{name.removeprefix('delta.constraints.')}' of "
                    f"{table}; nothing of the day was loaded. Drop the constraint, or keep such rows out by "
                    f"table.expectations.ranges"
                )


def _add_columns(jvm: Any, transaction: Any, metadata: dict[str, Any], columns: Sequence[StructField]) -> None:
    """Let the table have columns that it lacks."""
    schema = json.loads(metadata["schemaString"])
    there = {field["name"].lower() for field in schema["fields"]}
    new = [field.jsonValue() for field in columns if field.name.lower() not in there]
    if not new:
        return
    schema["fields"] += new
    changed = {"metaData": metadata | {"schemaString": json.dumps(schema, ensure_ascii=False)}}
    action = jvm.org.apache.spark.sql.delta.actions.Action.fromJson(json.dumps(changed, ensure_ascii=False))
    transaction.updateMetadata(action, False)


def _sequence(jvm: Any, items: Sequence[Any]) -> Any:
    listed = jvm.java.util.ArrayList()
    for item in items:
        listed.add(item)
    return jvm.scala.jdk.javaapi.CollectionConverters.asScala(listed).toSeq()
