"""Delta tables and Spark: a version as a DataFrame, commits under a lease, and what else only Spark can do.

Spark evaluates the SQL constraints that others gave a table, and writes its checkpoints.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.readwriter import DataFrameWriter
from pyspark.sql.types import StructType

from headrace.config.schema import quoted
from headrace.errors import UserError
from headrace.lake.delta.log import DataFile, DeltaLog, TableState, check_files, file_path
from headrace.lake.delta.log_files import ROWS, commit_file, set_torn_aside
from headrace.lake.delta.transaction import (
    Transaction,
    TransactionOvertaken,
    committed_as,
    create_table,
    lease_application,
    next_lease_version,
    refuse_overtaken,
)
from headrace.storage import Fence, Location, sync_files

_LOG = logging.getLogger("headrace.lake")
#: Spark lists more files than these by a job (spark.sql.sources.parallelPartitionDiscovery.threshold).
_FEW = 32
#: Paths that are no globs, and partition values that are their folders' names unescaped.
_PLAIN_PATH = re.compile(r"[^\\*?{}\[\]]+")
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9._-]+")
#: Characters in names with which Delta begins no table, unless it maps columns; it reads and writes those that have
#: them.
_REFUSED_CHARACTERS = frozenset(" ,;{}()\n\t=")


def broken_constraints(rows: DataFrame, constraints: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(name, rows that break it) of the constraints that some rows break: what Delta checks where Spark writes.

    Args:
        rows: those to be added.
        constraints: SQL by name (`headrace.lake.delta.transaction.Transaction.constraints`).
    """
    for name, text in constraints.items():
        broken = rows.where(~F.coalesce(F.expr(text), F.lit(False))).count()
        if broken:
            yield name, broken


def write_checkpoint(spark: SparkSession, table: Location) -> None:
    """Delta's own, as its writers leave one after some commits: who reads the table then reads less of its log."""
    jvm: Any = spark._jvm
    try:
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(table))
        # The start of a transaction loads the newest version.
        log.startTransaction()
        log.checkpoint()
    except Exception as e:  # of Spark, Java or an ended JVM: the commit exists in any case
        java = getattr(e, "java_exception", None)
        _LOG.warning("%s: no checkpoint was written: %s", table, e if java is None else java.getMessage())


def read_version(
    spark: SparkSession, table: Location, version: int, is_wanted: Callable[[Mapping[str, str | None]], bool]
) -> DataFrame:
    """Return the rows of a version of a table, its columns in the table's order.

    A few plain Parquet files are read as such: Delta's own reader asks Spark three times which files there are, which
    takes 2 to 4 s for the first table of an application. All else Delta reads.

    Args:
        spark: the session.
        table: its folder.
        version: of the table.
        is_wanted: by the values of the partition columns, whether a file is wanted. Rows of others may be there all the
            same: who does not want them filters them.

    Raises:
        UserError: a wanted file is gone, or has another size than the log says: Spark would read an empty one as no
            rows.
    """
    state = DeltaLog(table).state(version)
    files = None if state is None else _plain_files(table, state, is_wanted)
    if state is not None:
        check_files(table, files or [f for f in state.data_files(table) if is_wanted(f.partition)])
    if state is None or not files:
        return spark.read.format("delta").option("versionAsOf", version).load(str(table))
    schema = StructType.fromJson(json.loads(state.metadata["schemaString"]))
    rows = spark.read.schema(schema).option("basePath", str(table)).parquet(*[str(f.path) for f in files])
    return rows.select(*[quoted(name) for name in schema.names])


def _plain_files(
    table: Location, state: TableState, is_wanted: Callable[[Mapping[str, str | None]], bool]
) -> list[DataFile] | None:
    """Return the wanted files; None where they are many, or Parquet's reader would take other rows from them."""
    names = state.metadata["partitionColumns"]
    if state.unknown_features or state.configuration.get("delta.columnMapping.mode", "none") != "none":
        return None
    files = [f for f in state.data_files(table) if is_wanted(f.partition)]
    # Delta does not know of replaced files (headrace.lake.delta.log_files).
    few = len(files) <= _FEW or any(ROWS in add for add in state.adds)
    plain = few and all(
        not f.vector and _PLAIN_PATH.fullmatch(str(f.path)) and f.path.parent == _folder(table, names, f) for f in files
    )
    return files if plain else None


def _folder(table: Location, names: list[str], file: DataFile) -> Location | None:
    """Return the folder that the values of the partition columns name, None where a file's folder has another name."""
    for name in names:
        value = file.partition.get(name)
        if value is None or not _PLAIN_VALUE.fullmatch(value) or not _PLAIN_VALUE.fullmatch(name):
            return None
        table = table / f"{name}={value}"
    return table


def save_delta(
    writer: DataFrameWriter,
    table: Location,
    fence: Fence | None,
    schema: StructType | None = None,
    partitioned_by: Sequence[str] = ("ds",),
) -> int:
    """Have a writer commit to a Delta table, and give the version of its commit.

    Delta refuses the commit where another one of the lease came in between, and passes it over where one with the same
    application version or a later one is there already: without a word, so the log is asked.

    Args:
        writer: of format `delta`, with its mode and options.
        table: its folder, made where it is missing.
        fence: of the holder of the lease under which the table is written; None: there is no lease.
        schema: of the rows, where their names may be such as Delta itself begins no table with.
        partitioned_by: the columns by which such a table is partitioned.

    Raises:
        LeaseLost: a later holder has committed; nothing was.
        UserError: a name that no table can have.
    """
    log = DeltaLog(table)
    set_torn_aside(table)
    if (
        schema is not None
        and log.version is None
        and any(_REFUSED_CHARACTERS & set(name) or not name for name in schema.names)
    ):
        create_table(table, [field.jsonValue() for field in schema.fields], list(partitioned_by), fence=fence)
    if fence is None:
        writer.save(str(table))
        version = log.version
        assert version is not None, "written just now"
        _sync_commit(log, version)
        return version
    application = lease_application(fence)
    while True:
        previous = log.version
        application_version = next_lease_version(
            table, fence, None if previous is None else log.application_version(application, previous)
        )
        try:
            writer.option("txnAppId", application).option("txnVersion", str(application_version)).save(str(table))
        except Exception:
            _check_newest(log, fence)
            raise
        version = committed_as(log, fence, application_version, -1 if previous is None else previous)
        if version is not None:
            _sync_commit(log, version)
            return version
        _check_newest(log, fence)


def _sync_commit(log: DeltaLog, version: int) -> None:
    """Return when a commit of Spark's, which syncs nothing, survives a power cut with the files that it adds."""
    actions = [action.get("add") or action.get("cdc") for action in log.actions(version)]
    files = [file_path(log.folder, action["path"]) for action in actions if action]
    sync_files(files, log.folder)
    sync_files([commit_file(log.folder / "_delta_log", version)], log.folder)


def _check_newest(log: DeltaLog, fence: Fence) -> None:
    newest = log.version
    if newest is not None:
        refuse_overtaken(log.folder, fence, log.application_version(lease_application(fence), newest))


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
