"""The two Delta tables that ingest writes: `events` and `quarantine`, partitioned by `ds`."""

from __future__ import annotations

from collections.abc import Collection

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from headrace.config import Table
from headrace.errors import UserError
from headrace.lake.delta.log import LOG_RETENTION, DeltaLog
from headrace.lake.session import spark_settings
from headrace.storage import Location

#: Delta leaves out a commit that changes nothing, and with it the record of the load.
SKIP_EMPTY = "spark.databricks.delta.skipRecordingEmptyCommits"
#: Columns of the table of bad rows.
QUARANTINE = "_source_file string, _source_line bigint, _raw string, _reason string, ds string"


def create_tables(spark: SparkSession, table: Table, events: Location, quarantine: Location) -> None:
    """Make both tables, empty, where they are not there."""
    create_quarantine(spark, quarantine)
    _create(spark, events, f"{table.spark_schema}, _source_file string, _source_line bigint, ds string")


def create_quarantine(spark: SparkSession, quarantine: Location) -> None:
    """Make the table of bad rows, empty, where it is not there."""
    _create(spark, quarantine, QUARANTINE)


def _create(spark: SparkSession, path: Location, ddl: str) -> None:
    if DeltaLog(path).version is None:
        schema = spark.createDataFrame([], ddl).schema
        (
            DeltaTable.createIfNotExists(spark)
            .location(str(path))
            .addColumns(schema)
            .partitionedBy("ds")
            # The load history is in the log.
            .property("delta.logRetentionDuration", LOG_RETENTION)
            .property("delta.enableDeletionVectors", "false")
            .property("delta.enableChangeDataFeed", "true")
            .execute()
        )


def check_columns(table: Table, events: Location, where: str = "") -> None:
    """Raises UserError where the table has a declared column as another type. `where`: before `table` in a key."""
    existing = {name.lower(): (name, type_) for name, type_ in DeltaLog(events).columns().items()}
    for c in table.columns:
        if c.name.lower() not in existing:
            continue
        name, type_ = existing[c.name.lower()]
        if name != c.name or not _same_type(type_, c.stored_type):
            raise UserError(
                f"{where}table.columns declares '{c.name}' as {c.type}, but {events} has '{name}' as {type_}; give the "
                f"column another name, or the pipeline, or move that table away to load everything again"
            )


def may_have_rows(table: Location, days: Collection[str]) -> bool:
    """Whether a table has, or may have, rows of the days."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else []
    return files is None or any(f.partition.get("ds") in days for f in files)


def replace_days(frame: DataFrame, path: Location, days: Collection[str], metadata: str) -> None:
    """Replace the days' partitions by the rows, in one commit: also where there are none, and were none."""
    listed = ", ".join(f"'{ds}'" for ds in days)
    with spark_settings(frame.sparkSession, {SKIP_EMPTY: "false"}):
        (
            frame.write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", f"ds IN ({listed})")
            .option("mergeSchema", "true")
            .option("userMetadata", metadata)
            .save(str(path))
        )


def _same_type(existing: str, declared: str) -> bool:
    """Delta's spelling of a type against the declaration's."""
    simple = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
    if declared.startswith("array<"):
        element = {"int": "integer", "bigint": "long"}.get(declared[6:-1], declared[6:-1])
        return f'"elementType": "{element}"' in existing
    return simple.get(existing, existing) == declared
