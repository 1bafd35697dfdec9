"""What tasks were brought of tables whose rows are joined in, added up on the driver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyspark import Accumulator, SparkContext

from headrace.lake.spark.tasks import ByPartition, this_partition


@dataclass(frozen=True)
class HeldRows:
    """What tasks were brought, for the manifest."""

    tables: tuple[str, ...]
    #: By partition: rows, their bytes, and the most rows at a time.
    counts: Accumulator[dict[int, tuple[int, int, int]]]

    @staticmethod
    def of(context: SparkContext, tables: Iterable[str]) -> HeldRows:
        """Nothing brought yet."""
        empty: dict[int, tuple[int, int, int]] = {}
        return HeldRows(tuple(sorted(tables)), context.accumulator(empty, ByPartition()))

    def add(self, rows: int, size: int, most: int) -> None:
        """Call at the end of a task: the rows that it was brought, their bytes, and the most at a time."""
        self.counts.add({this_partition(): (rows, size, most)})

    def facts(self) -> dict[str, Any]:
        """The tables; rows and bytes of all tasks, and the most rows of one."""
        found = list(self.counts.value.values())
        return {
            "tables": list(self.tables),
            "rows": sum(rows for rows, _, _ in found),
            "bytes": sum(size for _, size, _ in found),
            "most_rows_of_a_task": max((most for _, _, most in found), default=0),
        }
