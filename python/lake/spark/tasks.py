"""Tasks that Spark only schedules: numbered work in Python, what it answers by partition, and its peak memory."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import RDD, Accumulator, AccumulatorParam, SparkContext, TaskContext
from pyspark.serializers import CPickleSerializer
from pyspark.sql import SparkSession

#: Result of a task: a JSON value.
TaskResult = Any
_T = TypeVar("_T")
#: Bytes that a task should read, about.
_BYTES_A_TASK = 64 << 20
_TASKS_A_CORE = 4
#: Most tasks of a stage whose executors are looked up.
_MOST_TASKS = 100_000
_KEPT_BYTES = 64 << 20
#: Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def run_tasks(
    spark: SparkSession | None,
    count: int,
    work: Callable[[int], Iterable[TaskResult]],
    hosts: Sequence[str | None] = (),
) -> list[TaskResult]:
    """Call `work` with 0 .. count-1, each in a Spark task; all that they yield, in that order.

    A task may run twice (a lost executor, speculation), so it must leave the same behind every time. Without a session
    they run here, one after the other.

    Args:
        spark: the session; None: there is none.
        count: of tasks.
        work: gives JSON values.
        hosts: see `numbered`.
    """
    if not count:
        return []
    if spark is None:
        return [json.loads(json.dumps(result)) for number in range(count) for result in work(number)]
    # Not a frame's: its plan, the code generated for it and Arrow's batches take half a second of processor time
    # in a new session, for numbers that go in and texts that come out.
    numbers = numbered(spark.sparkContext, count, hosts)
    return [json.loads(result) for result in numbers.mapPartitions(_Each(work)).collect()]


def numbered(context: SparkContext, count: int, hosts: Sequence[str | None] = ()) -> RDD[int]:
    """Return the numbers 0 .. count-1, each in a partition of its own that Spark would rather run where `hosts` says.

    Args:
        hosts: by number: a host, or 'executor_HOST_ID'; None: anywhere. Empty: all anywhere.
    """
    if not any(hosts):
        return context.parallelize(range(count), count)
    jvm, serializer = context._jvm, CPickleSerializer()
    assert jvm is not None
    pairs = jvm.java.util.ArrayList()
    for number, host in enumerate(hosts):
        places = jvm.java.util.ArrayList()
        if host is not None:
            places.add(host)
        item = bytearray(serializer.dumps(number))  # type: ignore[no-untyped-call]
        pairs.add(jvm.scala.Tuple2(item, _sequence(jvm, places)))
    of_bytes = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    java_rdd = context._jsc.sc().makeRDD(_sequence(jvm, pairs), of_bytes)
    return RDD(java_rdd.toJavaRDD(), context, serializer)


def executors_of(spark: SparkSession, stages: Iterable[int]) -> dict[int, str]:
    """Return the executor of each task of some stages by the number of its attempt: 'executor_HOST_ID', as `numbered`
    takes it.

    It is a preference's: tasks of a stage's further attempts, and those that Spark has forgotten, are not there.
    """
    store = spark.sparkContext._jsc.sc().statusStore()
    executors = {}
    for stage in stages:
        tasks = store.taskList(stage, 0, _MOST_TASKS)
        for i in range(tasks.size()):
            task = tasks.apply(i)
            executors[task.taskId()] = f"executor_{task.host()}_{task.executorId()}"
    return executors


def _sequence(jvm: Any, items: Any) -> Any:
    """Return a Java list as Scala's immutable Seq."""
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(items)


def cores_of(spark: SparkSession | None) -> int:
    """Return how many tasks run at once."""
    return 1 if spark is None else spark.sparkContext.defaultParallelism


def grouped(items: Sequence[_T], size: Callable[[_T], int], cores: int) -> list[list[_T]]:
    """Items in groups for tasks, the largest groups first: about even, many where there are many bytes."""
    total = sum(size(i) for i in items)
    most = max(1, min(_BYTES_A_TASK, total // (_TASKS_A_CORE * cores)))
    groups: list[tuple[int, list[_T]]] = []
    filled, group = 0, list[_T]()
    for item in items:
        if group and filled + size(item) > most:
            groups.append((filled, group))
            filled, group = 0, []
        group.append(item)
        filled += size(item)
    if group:
        groups.append((filled, group))
    return [g for _, g in sorted(groups, key=lambda pair: -pair[0])]


@dataclass(frozen=True)
class _Each:
    """Function of a partition that calls `work` with each of its numbers."""

    work: Callable[[int], Iterable[TaskResult]]

    def __call__(self, numbers: Iterable[int]) -> Iterator[str]:
        prepare_worker()
        for number in numbers:
            yield from (json.dumps(result) for result in self.work(number))


@cache
def prepare_worker() -> None:
    """Once in each worker."""
    # A task has one core.
    pa.set_cpu_count(1)
    _keep_pages()
    # After each task the worker collects garbage, which takes 0.04 s where it must look at all that is imported: by now
    # that is all, for the work has come.
    gc.collect()
    gc.freeze()


def _keep_pages() -> None:
    """Let this process use memory again that it has freed, Arrow's arrays included.

    A seventh of the processor time of tasks over columns went into pages that were given back and asked for again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Only glibc has mallopt. Larger arrays stay mapped; up to this many bytes may stay at the heap's end.
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES):
        pa.set_memory_pool(pa.system_memory_pool())


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


class ByPartition(AccumulatorParam[dict[int, Any]]):
    """One answer for each partition: a task that is run twice says the same twice."""

    def zero(self, value: dict[int, Any]) -> dict[int, Any]:
        return {}

    def addInPlace(self, value1: dict[int, Any], value2: dict[int, Any]) -> dict[int, Any]:
        return value1 | value2


def this_partition() -> int:
    """Return the number of the partition that the calling task computes."""
    task = TaskContext.get()
    assert task is not None
    return task.partitionId()
