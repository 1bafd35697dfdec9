"""What tasks of a job say of themselves, one answer for each partition."""

from __future__ import annotations

from typing import Any

from pyspark import AccumulatorParam, TaskContext


class ByPartition(AccumulatorParam[dict[int, Any]]):
    """One answer for each partition: a task that is run twice says the same twice."""

    def zero(self, value: dict[int, Any]) -> dict[int, Any]:
        return {}

    def addInPlace(self, value1: dict[int, Any], value2: dict[int, Any]) -> dict[int, Any]:
        return value1 | value2


def this_partition() -> int:
    """In a task: the number of its partition."""
    task = TaskContext.get()
    assert task is not None
    return task.partitionId()
