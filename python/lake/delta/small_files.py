"""Partitions of a Delta table that have many small files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.lake.delta.log import DeltaLog
from headrace.storage import Location


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


def _day(add: Mapping[str, Any]) -> str | None:
    return dict(add["partitionValues"] or {}).get("ds")
