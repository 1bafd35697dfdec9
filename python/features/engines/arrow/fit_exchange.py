"""Statistics that merge in tasks: Spark brings those of one part of the keys together, and none pass through the driver
but those that are small.

Each task gives its files' statistics by parts of the keys' hash. What comes back: of operators that learn numbers the
merged statistics, of vocabularies a frame of values with their counts, which is wherever Spark has it; of operators
that learn tables by key the merged statistics or, where these are large, such a frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import StorageLevel, TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.features.engines import keyed_exchange
from headrace.features.engines.arrow.aggregate_task import AggregateTask, Name
from headrace.features.engines.arrow.lake_rows import LakeRows, ScanTask, table_at
from headrace.features.engines.arrow.text_counts import counted
from headrace.features.engines.blocks import Sender, cut, packed, unpacked
from headrace.features.engines.keyed_exchange import is_by_key
from headrace.features.functions.arrays import one_chunk
from headrace.features.learn.merge import merge
from headrace.features.learn.statistics import Partial, counts
from headrace.features.ops.categories import Categorify
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.lake.spark.exchange import Block, exchange, small_batches
from headrace.lake.spark.tasks import cores_of, executors_of
from headrace.storage import Location
from headrace.udfs.xxhash64 import xxhash64_strings

#: Of lake files, whose statistics one task is to merge; and most such tasks.
_BYTES_A_TASK, _MOST_TASKS = 64 << 20, 2_000
#: Instead of a table's number: what was counted in a file.
_FACTS = -1
_MERGED = "name int, value string, count bigint, day bigint, statistic binary"
_MERGED_SCHEMA = pa.schema(
    [
        ("name", pa.int32()),
        ("value", pa.string()),
        ("count", pa.int64()),
        ("day", pa.int64()),
        ("statistic", pa.binary()),
    ]
)
#: Values of a batch on its way to the JVM.
_BATCH_ROWS = 10_000


@dataclass(frozen=True)
class Tables:
    """What statistics of a turn are numbered by: those of operators, then vocabularies."""

    statistics: tuple[Name, ...]
    vocabularies: tuple[str, ...]

    @staticmethod
    def of(task: AggregateTask) -> Tables:
        statistics, vocabularies = list[Any](), dict[str, None]()
        for (i, j), found in task.requested.items():
            op = task.workflow.chains[i].steps[j].op
            for name in found:
                if isinstance(op, Categorify):
                    vocabularies[op.vocabulary_of(name)] = None
                else:
                    statistics.append((i, j, name))
        return Tables(tuple(statistics), tuple(vocabularies))

    def number(self, task: AggregateTask, name: Name) -> int:
        op = task.workflow.chains[name[0]].steps[name[1]].op
        if isinstance(op, Categorify):
            return len(self.statistics) + self.vocabularies.index(op.vocabulary_of(name[2]))
        return self.statistics.index(name)

    def by_key(self, task: AggregateTask) -> list[int]:
        """Numbers of statistics of which tasks can make tables, key by key."""
        return [
            number
            for number, (i, j, name) in enumerate(self.statistics)
            if is_by_key(task.workflow.chains[i].steps[j], task.requested[i, j][name])
        ]


@dataclass(frozen=True)
class Merged:
    """The statistics of a turn over all files."""

    #: Of operators, but for those in `keyed`.
    statistics: Mapping[Name, Partial]
    #: (name string, value string, count bigint, day bigint) of vocabularies; None: no value is counted in this turn.
    values: DataFrame | None
    #: Numbers of statistics that are too large for the driver, and (name int, statistic binary) that has them.
    keyed: Mapping[Name, int]
    partials: DataFrame
    #: What the frames read, on the executors' disks until `release`.
    persisted: DataFrame | None = None

    def release(self) -> None:
        """Free it: codes have been given and tables made."""
        if self.persisted is not None:
            self.persisted.unpersist()


def scan_merged(rows: LakeRows, spark: SparkSession, task: AggregateTask) -> Merged:
    """`LakeRows.scan` where tasks see no common folder: statistics merge on their way."""
    tasks = rows.tasks(spark)
    tables = Tables.of(task)
    size = sum(file.size for file in rows.files)
    partitions = max(1, min(_MOST_TASKS, max(cores_of(spark), size // _BYTES_A_TASK)))
    send = SendStatistics(ScanTask(tasks, rows.folder, rows.layout, rows.splitter, None), task, tables, partitions)
    receive = MergeStatistics(tables, {n: task.workflow.rules[n] for n in tables.vocabularies})
    by_key = tables.by_key(task)
    with small_batches(spark):
        merged = exchange(spark, len(tasks), send, partitions, receive, _MERGED, rows.hosts_of(tasks))
        again = bool(tables.vocabularies or by_key)
        if again:
            # They are looked at more than once; what is lost is made again of what the tasks sent.
            merged = merged.persist(StorageLevel.DISK_ONLY)
        partials = merged.where("statistic is not null").select("name", "statistic", "count")
        is_keyed = F.col("name").isin(by_key)
        found = partials.withColumn("statistic", F.when(~is_keyed, F.col("statistic"))).collect()
        large = sum(r["count"] for r in found if r.name in by_key) > keyed_exchange.most_in_driver(spark)
        if by_key and not large:
            found += partials.where(is_keyed).collect()
    facts = [json.loads(r.statistic) for r in found if r.name == _FACTS]
    rows.noted(facts)
    executors = executors_of(spark, {f["stage"] for f in facts})
    rows.hosts.update({rows.files[f["file"]].key: executors[f["task"]] for f in facts if f["task"] in executors})
    parts: dict[Name, list[Partial]] = {}
    for r in found:
        if r.name != _FACTS and r.statistic is not None:
            for number, table in unpacked(bytes(r.statistic)):
                parts.setdefault(tables.statistics[number], []).append(table.replace_schema_metadata(None))
    values = None
    if tables.vocabularies:
        name = F.element_at(
            F.array(*map(F.lit, tables.vocabularies)), F.col("name") - F.lit(len(tables.statistics)) + 1
        )
        values = merged.where("statistic is null").select(name.alias("name"), "value", "count", "day")
    return Merged(
        {name: merge(mine) for name, mine in parts.items()},
        values,
        {tables.statistics[number]: number for number in by_key} if large else {},
        partials.where(is_keyed).select("name", "statistic"),
        merged if again else None,
    )


def merged_by_key(
    spark: SparkSession, folder: Location, files: Sequence[StatisticsFile], tables: Tables, size: int
) -> DataFrame:
    """Statistics that tasks left in a folder which all see, merged: (name int, statistic binary).

    Args:
        spark: the session.
        folder: of the files.
        files: those.
        tables: what the statistics are numbered by.
        size: bytes of all of them.
    """
    partitions = max(1, min(_MOST_TASKS, size // _BYTES_A_TASK))
    send = SendFiles(folder, tuple(files), partitions)
    merged = exchange(spark, len(files), send, partitions, MergeStatistics(tables, {}), _MERGED)
    return merged.select("name", "statistic")


@dataclass(frozen=True)
class StatisticsFile:
    """A file of `headrace.features.engines.arrow.lake_rows.concatenated`."""

    name: str
    #: (number of a statistic, where it begins).
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SendFiles:
    """In a task: the statistics of a file, to the partitions of their keys."""

    folder: Location
    files: tuple[StatisticsFile, ...]
    partitions: int

    def __call__(self, task: int) -> Iterator[Block]:
        sender, file = Sender(task), self.files[task]
        for number, start in file.parts:
            partial = table_at(self.folder / file.name, start)
            for partition, mine in by_key(partial, self.partitions, number):
                yield from sender.add(partition, number, mine)
        yield from sender.rest()


@dataclass(frozen=True)
class SendStatistics:
    """In a task: the statistics of its files, to the partitions of their keys; what was counted, to partition 0."""

    scan: ScanTask
    visit: AggregateTask
    tables: Tables
    partitions: int

    def __call__(self, task: int) -> Iterator[Block]:
        for scan in self.scan.files(task):
            sender = Sender(scan.number)
            for name, partial in self.visit.partials(scan.rows()):
                number = self.tables.number(self.visit, name)
                for partition, mine in by_key(partial, self.partitions, number):
                    yield from sender.add(partition, number, mine)
            yield from sender.rest()
            context = TaskContext.get()
            facts = scan.facts()
            if context is not None:
                facts |= {"stage": context.stageId(), "task": context.taskAttemptId()}
            table = pa.table({"facts": pa.array([json.dumps(facts)])})
            yield sender.block(0, packed(table, _FACTS))


def by_key(partial: Partial, partitions: int, number: int) -> Iterator[tuple[int, Partial]]:
    """The groups of a statistic by partition, all of one key in one; a statistic without texts for keys in one."""
    if "key" not in partial.column_names or not pa.types.is_string(partial.schema.field("key").type):
        yield number % partitions, partial
        return
    hashes = xxhash64_strings(one_chunk(partial.column("key"))) if partial.num_rows else np.empty(0, np.int64)
    of: npt.NDArray[np.int64] = hashes % partitions
    order = np.argsort(of, kind="stable")
    edges = np.searchsorted(of[order], np.arange(partitions + 1)).tolist()
    ordered = partial.take(pa.array(order)) if partitions > 1 else partial
    for partition in range(partitions):
        start, end = edges[partition : partition + 2]
        if start < end:
            yield partition, ordered.slice(start, end - start)


@dataclass(frozen=True)
class MergeStatistics:
    """In a task: what came to a partition, merged (_MERGED)."""

    tables: Tables
    rules: Mapping[str, VocabularyRule]

    def __call__(self, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        parts: dict[int, list[Partial]] = {}
        for block in blocks:
            for number, table in unpacked(block.payload):
                if number == _FACTS:
                    yield _row(_FACTS, table.column(0)[0].as_py().encode())
                else:
                    parts.setdefault(number, []).append(table.replace_schema_metadata(None))
        first = len(self.tables.statistics)
        for number, mine in sorted(parts.items()):
            if number < first:
                for piece in cut(merge(mine)):
                    yield _row(number, packed(piece, number))
                continue
            found = counted_values(mine, self.rules[self.tables.vocabularies[number - first]].min_count)
            yield from _values(number, found)


def counted_values(parts: Sequence[Partial], least: int) -> Partial:
    """(key, rows, day) of the values that are there often enough."""
    whole = counted(parts, least)
    if whole is None:
        whole = merge(parts)
        whole = whole.filter(pa.array(counts(whole) >= least))
    return whole


def _row(number: int, statistic: bytes) -> pa.RecordBatch:
    """A statistic, or what was counted; `count` is its bytes."""
    columns = [[number], [None], [len(statistic)], [None], [statistic]]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, _MERGED_SCHEMA, strict=True)], schema=_MERGED_SCHEMA
    )


def _values(number: int, found: Partial) -> Iterator[pa.RecordBatch]:
    n = found.num_rows
    table = pa.table(
        [
            pa.array(np.full(n, number, np.int32)),
            found.column("key"),
            found.column("rows"),
            found.column("day"),
            pa.nulls(n, pa.binary()),
        ],
        schema=_MERGED_SCHEMA,
    )
    yield from table.to_batches(_BATCH_ROWS)
