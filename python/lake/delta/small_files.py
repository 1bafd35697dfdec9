"""Partitions of a Delta table that have many small files, and their rows in fewer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.lake.delta.log import DeltaLog, check_files
from headrace.lake.delta.transaction import check_may_shrink
from headrace.storage import Fence, Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Of a file that joins others, about: as OPTIMIZE has it.
_FILE_BYTES = 1 << 30


def crowded(table: Location, files: int, size: float) -> tuple[list[str | None], int]:
    """The partitions `ds` with at least so many files that are smaller than a size; and the bytes of these files.

    Args:
        table: its folder.
        files: how many.
        size: bytes.

    Returns:
        Days, [None] of a table without partitions; empty where there is no such partition, or the table has others.
    """
    log = DeltaLog(table)
    version = log.version
    state = log.state(version) if version is not None else None
    partitioned = list((state.metadata.get("partitionColumns") if state else None) or [])
    if state is None or partitioned not in ([], ["ds"]):
        return [], 0
    found: dict[str | None, list[int]] = {}
    for add in state.adds:
        if add["size"] < size:
            found.setdefault(_day(add), []).append(add["size"])
    many = {ds: sizes for ds, sizes in found.items() if len(sizes) >= files}
    return sorted(many, key=str), sum(sum(sizes) for sizes in many.values())


def rewrite(spark: SparkSession, table: Location, days: Sequence[str | None], fence: Fence | None) -> None:
    """Write the files of some days into as few as there need be, one commit a day: rows stay the same.

    So do older versions of the table. Rows that deletion vectors hide are in none of the new files. Neither OPTIMIZE
    nor REORG, whose commits would go behind those of a later holder as behind anybody's, but an overwrite that says
    that no data changes: it reads and writes all files of a day, large ones, too. Not of a table that only grows: see
    `headrace.lake.join_files`.

    Args:
        spark: the session.
        table: its folder.
        days: partitions `ds`; None: the whole table.
        fence: of the holder of the lease under which the table is written.

    Raises:
        UserError: the table only grows (`delta.appendOnly`), and Delta lets nobody overwrite it; or a file is damaged.
        LeaseLost: a later holder has committed; nothing was committed since.
    """
    # Late: pyspark takes a while, and most tables need nothing.
    from pyspark.sql import functions as F

    from headrace.lake.delta.fenced_write import save_delta

    for day in days:
        log = DeltaLog(table)
        version = log.version
        assert version is not None, "there is a table"
        state = log.state(version)
        check_may_shrink(table, state)
        size = sum(a["size"] for a in state.adds if day in (None, _day(a))) if state is not None else 0
        if state is not None:
            check_files(table, [f for f in state.data_files(table) if day in (None, f.partition.get("ds"))])
        rows = spark.read.format("delta").load(str(table))
        rows = rows if day is None else rows.where(F.col("ds") == day)
        writer = rows.coalesce(max(1, math.ceil(size / _FILE_BYTES))).write.format("delta").mode("overwrite")
        writer = writer.option("dataChange", "false")
        if state is not None and (partitioned := list(state.metadata.get("partitionColumns") or [])):
            writer = writer.partitionBy(*partitioned)
        save_delta(writer if day is None else writer.option("replaceWhere", f"ds = '{day}'"), table, fence)


def only_grows(table: Location) -> bool:
    """Whether Delta lets nobody remove or replace rows of a table (`delta.appendOnly`)."""
    log = DeltaLog(table)
    version = log.version
    state = log.state(version) if version is not None else None
    return state is not None and state.configuration.get("delta.appendOnly") == "true"


def _day(add: Mapping[str, Any]) -> str | None:
    return dict(add["partitionValues"] or {}).get("ds")
