"""Peak memory of Spark's Python workers, which the driver cannot see from outside."""

from __future__ import annotations

import resource

from pyspark import Accumulator, AccumulatorParam, SparkContext


class _Maximum(AccumulatorParam[float]):
    """Keeps the highest value."""

    def zero(self, value: float) -> float:
        return 0.0

    def addInPlace(self, value1: float, value2: float) -> float:
        return max(value1, value2)


def worker_peak_memory(context: SparkContext) -> Accumulator[float]:
    """MiB of the largest Python worker that has called `report_peak_memory` in a finished task; 0 before any has."""
    return context.accumulator(0.0, _Maximum())


def report_peak_memory(peak: Accumulator[float]) -> None:
    """Call at the end of a task: the peak resident size of this process since it was started."""
    peak.add(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))
