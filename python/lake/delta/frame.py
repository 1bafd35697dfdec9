"""A version of a Delta table as a DataFrame."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from headrace.identifiers import quoted
from headrace.lake.delta.erased import ROWS
from headrace.lake.delta.log import DataFile, DeltaLog, TableState, check_files
from headrace.storage import Location

#: More files than these Spark lists by a job of its own (spark.sql.sources.parallelPartitionDiscovery.threshold).
_FEW = 32
#: What a path may not have to be taken for a glob, and a partition's value to be its folder's name as it is.
_PLAIN = re.compile(r"[^\\*?{}\[\]]+")
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9._-]+")


def read_version(
    spark: SparkSession, table: Location, version: int, wanted: Callable[[Mapping[str, str | None]], bool]
) -> DataFrame:
    """The rows of a version of a table, its columns in the table's order.

    A few plain Parquet files are read as such: Delta's own reader asks Spark three times which files there are, which
    takes 2 to 4 s for the first table of an application. All else Delta reads.

    Args:
        spark: the session.
        table: its folder.
        version: of the table.
        wanted: by the values of the partition columns, whether a file is wanted. Rows of others may be there all the
            same: who does not want them filters them.

    Raises:
        UserError: a wanted file is gone, or has another size than the log says: Spark would read an empty one as no
            rows.
    """
    state = DeltaLog(table).state(version)
    files = None if state is None else _plain_files(table, state, wanted)
    if state is not None:
        check_files(table, files or [f for f in state.data_files(table) if wanted(f.partition)])
    if state is None or not files:
        return spark.read.format("delta").option("versionAsOf", version).load(str(table))
    schema = StructType.fromJson(json.loads(state.metadata["schemaString"]))
    rows = spark.read.schema(schema).option("basePath", str(table)).parquet(*[str(f.path) for f in files])
    return rows.select(*[quoted(name) for name in schema.names])


def _plain_files(
    table: Location, state: TableState, wanted: Callable[[Mapping[str, str | None]], bool]
) -> list[DataFile] | None:
    """The wanted files; None where they are many, or Parquet's reader would take other rows from them."""
    names = state.metadata["partitionColumns"]
    if state.unknown_features or state.configuration.get("delta.columnMapping.mode", "none") != "none":
        return None
    found = [f for f in state.data_files(table) if wanted(f.partition)]
    # Delta itself knows nothing of files in the places of others.
    few = len(found) <= _FEW or any(ROWS in add for add in state.adds)
    plain = few and all(
        not f.vector and _PLAIN.fullmatch(str(f.path)) and f.path.parent == _folder(table, names, f) for f in found
    )
    return found if plain else None


def _folder(table: Location, names: list[str], file: DataFile) -> Location | None:
    """Where the values of the partition columns say that a file is; None where its folder has another name."""
    for name in names:
        value = file.partition.get(name)
        if value is None or not _PLAIN_VALUE.fullmatch(value) or not _PLAIN_VALUE.fullmatch(name):
            return None
        table = table / f"{name}={value}"
    return table
