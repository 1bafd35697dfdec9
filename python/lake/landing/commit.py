"""Delta tables `events` and `quarantine`, partitioned by `ds`: their creation, and commits that replace days."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import date

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Table
from headrace.errors import UserError
from headrace.lake.delta.data_files import WrittenFile, ddl_fields
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.delta.with_spark import broken_constraints, write_checkpoint
from headrace.schema import is_wider
from headrace.storage import Fence, Location, StoreRefused

_LOG = logging.getLogger("headrace.lake")

#: Columns of the table of bad rows.
QUARANTINE = "_source_file string, _source_line bigint, _raw string, _reason string, ds string"


def create_tables(table: Table, events: Location, quarantine: Location) -> None:
    """Make both tables, empty, where they are not there. Needs an active session, which reads the declaration."""
    create_quarantine(quarantine)
    _create(events, f"{table.spark_schema}, _source_file string, _source_line bigint, ds string")


def create_quarantine(quarantine: Location) -> None:
    """Make the table of bad rows, empty, where it is not there. Needs an active session."""
    _create(quarantine, QUARANTINE)


def _create(path: Location, ddl: str) -> None:
    if DeltaLog(path).version is None:
        create_table(path, [f.jsonValue() for f in ddl_fields(ddl)], ["ds"])


def check_columns(table: Table, events: Location, section: str = "") -> None:
    """Compare the declared columns with those of the table, whose types may become wider by the load.

    Args:
        table: the declaration.
        events: the table's folder.
        section: before `table` in a key of the spec.

    Raises:
        UserError: the table has a declared column as a type that is neither the declared one nor a narrower one.
    """
    existing = {name.lower(): (name, type_) for name, type_ in DeltaLog(events).column_types().items()}
    for c in table.columns:
        name, type_ = existing.get(c.name.lower(), (c.name, c.stored_type))
        if name == c.name and is_wider(c.stored_type, type_):
            _LOG.info("%s: column '%s' becomes %s, and was %s; loaded days stay", events, name, c.stored_type, type_)
        elif name != c.name or type_ != c.stored_type:
            raise UserError(
                f"{section}table.columns declares '{c.name}' as {c.type}, but {events} has '{name}' as {type_}, and a "
                f"type can only become wider (int to bigint, float to double, decimals with more digits); give the "
                f"column another name, or the pipeline, or move that table away to load everything again"
            )


def may_have_rows(table: Location, days: Collection[str]) -> bool:
    """Return whether a table has, or may have, rows of the days."""
    log = DeltaLog(table)
    files = log.files(log.version) if log.version is not None else []
    return files is None or any(f.partition.get("ds") in days for f in files)


def commit_files(
    spark: SparkSession,
    table: Location,
    days: Sequence[str],
    files: Sequence[WrittenFile],
    metadata: str,
    columns: str = "",
    fence: Fence | None = None,
    since: int | None = None,
    local: Collection[int] = (),
) -> int:
    """Replace the days' partitions by data files, in one commit: also where there are none, and were none.

    Args:
        spark: the session, which is asked only where others have given the table constraints, and for checkpoints.
        table: its folder.
        days: ISO days.
        files: of these days, in the table's folder.
        metadata: the commit's userMetadata.
        columns: that the table has afterwards, in Spark's DDL; those that it lacks are added.
        fence: of the holder of the lease under which the table is written.
        since: version of the table on which the rows rest, -1 where there was no table; None: on none.
        local: versions since then that this run has committed itself.

    Returns:
        The version that was committed.

    Raises:
        TransactionOvertaken: another writer has changed rows of these days since then, or these days or the table
            itself since the commit began.
        UserError: rows break a constraint that others have given the table; a table that must not be written without
            Spark.
        LeaseLost: a later holder of the lease has committed.
    """
    transaction = Transaction(table, fence=fence)
    _check(spark, table, transaction.constraints, files)
    values = [date.fromisoformat(ds).isoformat() for ds in days]
    fields = [f.jsonValue() for f in ddl_fields(columns)] if columns else []
    if since is not None:
        transaction.refuse_changes_since(since, "ds", values, local)
    version = transaction.replace("ds", values, [f.add_action() for f in files], metadata, fields)
    if transaction.wants_checkpoint(version):
        write_checkpoint(spark, table)
    return version


@contextmanager
def forgotten_unless_refused(written: list[WrittenFile], committed: Sequence[WrittenFile]) -> Iterator[None]:
    """Take committed files off the list of files to remove, unless the commit was refused.

    Of a commit whose answer is lost nobody knows here whether the log names the files; neither where the process is
    interrupted. Files that it does not name take room until VACUUM; files that it names must be there.

    Args:
        written: files that no commit names; changed in place.
        committed: those that this commit names.
    """
    try:
        yield
    except UserError as e:
        if isinstance(e, StoreRefused):
            _forget(written, committed)
        raise
    except BaseException:
        _forget(written, committed)
        raise
    _forget(written, committed)


def _forget(written: list[WrittenFile], committed: Sequence[WrittenFile]) -> None:
    paths = {f.path for f in committed}
    written[:] = [f for f in written if f.path not in paths]


def _check(spark: SparkSession, table: Location, constraints: dict[str, str], files: Sequence[WrittenFile]) -> None:
    """Raise UserError where rows break a constraint."""
    for ds in sorted({f.ds for f in files}) if constraints else ():
        rows = spark.read.parquet(*(str(table / f.path) for f in files if f.ds == ds)).withColumn("ds", F.lit(ds))
        for name, broken in broken_constraints(rows, constraints):
            raise UserError(
                f"{broken:,} rows of {ds} break the constraint '{name}' of {table}; nothing of the day was loaded. "
                f"Drop the constraint, or keep such rows out by table.expectations.ranges"
            )
