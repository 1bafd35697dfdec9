"""Commits by Spark that carry the token of a lease's holder."""

from __future__ import annotations

from pyspark.sql.readwriter import DataFrameWriter

from headrace.lake.delta.fencing import application_of, check, committed, next_version
from headrace.lake.delta.log import DeltaLog
from headrace.storage import Fence, Location


def save_delta(writer: DataFrameWriter, table: Location, fence: Fence | None) -> int:
    """Have a writer commit to a Delta table, and give the version of its commit.

    Delta refuses the commit where another one of the lease came in between, and passes it over where one with the same
    application version or a later one is there already: without a word, so the log is asked.

    Args:
        writer: of format `delta`, with its mode and options.
        table: its folder, made where it is missing.
        fence: of the holder of the lease under which the table is written; None: there is no lease.

    Raises:
        LeaseLost: a later holder has committed; nothing was.
    """
    log = DeltaLog(table)
    if fence is None:
        writer.save(str(table))
        version = log.version
        assert version is not None, "written just now"
        return version
    application = application_of(fence)
    while True:
        before = log.version
        mine = next_version(table, fence, None if before is None else log.application_version(application, before))
        try:
            writer.option("txnAppId", application).option("txnVersion", str(mine)).save(str(table))
        except Exception:
            _check_newest(log, fence)
            raise
        version = committed(log, fence, mine, -1 if before is None else before)
        if version is not None:
            return version
        _check_newest(log, fence)


def _check_newest(log: DeltaLog, fence: Fence) -> None:
    newest = log.version
    if newest is not None:
        check(log.folder, fence, log.application_version(application_of(fence), newest))
