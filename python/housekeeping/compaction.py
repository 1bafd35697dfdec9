"""Tables whose partitions have many small files, which are joined without Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from headrace.housekeeping.step import Step
from headrace.housekeeping.tables import tables_of
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.lake.delta.small_files import crowded
from headrace.lake.delta.transaction import Transaction, UnsupportedTable
from headrace.lake.join_files import join_files
from headrace.storage import Location

log = logging.getLogger("headrace.housekeeping")

_MIB = 1 << 20


def compaction_steps(state: WorkspaceState) -> Iterator[Step]:
    """One step for each table that has such partitions, and can be written; the others are named."""
    keep = state.keep
    if keep.compact_files is None:
        return
    for table in tables_of(state.ws, state.pipeline):
        days, size = crowded(table, keep.compact_files, keep.compact_mib * _MIB)
        if days and _can_be_written(table):
            where = "" if days == [None] else f" of {len(days)} days"
            reason = f"{keep.compact_files} or more files below {keep.compact_mib:g} MiB"
            what = f"{state.ws.name_of(table)}{where}"
            yield Step(
                "compaction", what, reason, size, partial(join_files, table, days, keep.compact_mib * _MIB, state.fence)
            )


def _can_be_written(table: Location) -> bool:
    try:
        Transaction(table)
    except UnsupportedTable as e:
        log.warning("the small files of a table stay as they are: %s", e)
        return False
    return True
