"""What tasks say of rules that they could not meet, added up on the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark import Accumulator, SparkContext

from headrace.lake.spark.tasks import ByPartition, this_partition
from headrace.score.rerank.unmet import IMPOSSIBLE, LISTS

Counts = dict[int, dict[tuple[str, str], int]]


@dataclass(frozen=True)
class UnmetByTask:
    """Picklable, for tasks of one job."""

    counts: Accumulator[Counts]

    @staticmethod
    def of(context: SparkContext) -> UnmetByTask:
        """Nothing said yet."""
        empty: Counts = {}
        return UnmetByTask(context.accumulator(empty, ByPartition()))

    def add(self, unmet: Mapping[tuple[str, str], int]) -> None:
        """Call at the end of a task, with all of its lists."""
        self.counts.add({this_partition(): dict(unmet)})

    def by_rule(self) -> dict[str, dict[str, int]]:
        """For the manifest, on the driver: by rule how many lists, and how many that provably could not meet it."""
        total: Counter[tuple[str, str]] = Counter()
        for counts in self.counts.value.values():
            total.update(counts)
        return {
            rule: {what: total[rule, what] for what in (LISTS, IMPOSSIBLE)} for rule in sorted({r for r, _ in total})
        }
