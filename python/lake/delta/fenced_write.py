"""Commits by Spark that carry the token of a lease's holder."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.readwriter import DataFrameWriter
from pyspark.sql.types import StructType

from headrace.lake.delta.damage import commit_file, set_torn_aside
from headrace.lake.delta.fencing import application_of, check, committed, next_version
from headrace.lake.delta.log import DeltaLog, file_path
from headrace.lake.delta.transaction import create_table
from headrace.storage import Fence, Location, sync_files

#: Characters in names with which Delta begins no table, unless it maps columns; it reads and writes those that have
#: them.
_REFUSED = frozenset(" ,;{}()\n\t=")


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
    if schema is not None and log.version is None and any(_REFUSED & set(name) or not name for name in schema.names):
        create_table(table, [field.jsonValue() for field in schema.fields], list(partitioned_by), fence=fence)
    if fence is None:
        writer.save(str(table))
        version = log.version
        assert version is not None, "written just now"
        _sync_commit(log, version)
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
        check(log.folder, fence, log.application_version(application_of(fence), newest))
