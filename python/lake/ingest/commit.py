"""The commits of ingest: days of a Delta table are replaced by data files that are there already."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import date

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.delta.data_files import WrittenFile, ddl_fields
from headrace.lake.delta.transaction import Transaction
from headrace.lake.delta.with_spark import broken_constraints, write_checkpoint
from headrace.storage import Fence, Location, StoreRefused


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
    """Within, files are committed. Afterwards they are no longer among those that are to be removed, unless the commit
    was refused.

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
