"""Statistics of the lake's files: computed by a task a file, merged on the driver or, between hosts, in tasks.

Where tasks see one folder, each leaves a file of statistics there and the driver merges them (`AggregateTask`). Else
Spark brings together the statistics of one part of the keys, and only small ones pass through the driver
(`scan_merged`): of operators that learn numbers the merged statistics, of vocabularies a frame of values with their
counts, of operators that learn tables by key the merged statistics or, where these are large, such a frame.

Texts are counted by parts of their hash: each part's table fits a core's cache, and no text is hashed twice. Tasks
leave their counts in the order of the parts (`in_parts`), and the driver merges part by part (`counted`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import StorageLevel, TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.features import transport
from headrace.features.arrow.aggregate import TrainRows, aggregate
from headrace.features.arrow.decode import HostFolder, LakeRowGroup, of_run_here
from headrace.features.arrow.kernels import DictionaryColumn, apply_op, counted_texts
from headrace.features.arrow.scan import LakeRows, ScanTask, concatenated, table_at
from headrace.features.functions.arrays import one_chunk
from headrace.features.learn.statistics import Partial, Statistic, counts, merge
from headrace.features.ops.base import FittedState, no_lookup
from headrace.features.ops.categories import Categorify
from headrace.features.transport import Sender, cut, is_by_key, packed, unpacked
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.keyed_tables import KeyedTable, MappedKeyedTable, keyed_of
from headrace.features.workflow.workflow import Workflow
from headrace.lake.spark.exchange import ExchangedBlock, exchange, small_batches
from headrace.lake.spark.tasks import cores_of, executors_of
from headrace.storage import Location
from headrace.storage.host_scratch import create_once
from headrace.udfs.arrow import xxhash64_strings

#: Largest statistic of a file to merge, in bytes: long keys may exceed the memory, and what an array holds.
_MERGED_BYTES = 256 << 20
#: (chain, step, name of the statistic).
Name = tuple[int, int, str]


@dataclass(frozen=True)
class AggregateTask:
    """Statistics to compute of a file, in a task: a `headrace.features.arrow.scan.FileVisitor`."""

    workflow: Workflow
    #: By chain: fitted states of its first steps, where the next one needs statistics.
    learned: tuple[tuple[FittedState, ...], ...]
    requested: Mapping[tuple[int, int], Mapping[str, Statistic]]
    folder: Location
    pass_number: int
    #: Keyed tables of `learned` that are too large to be in it.
    shared_tables: Mapping[Name, SharedKeyedTable] = field(default_factory=dict)

    def __call__(self, number: int, scanned: Iterable[tuple[LakeRowGroup, TrainRows]]) -> dict[str, Any]:
        names: list[Name] = []

        def tables() -> Iterator[Partial]:
            for name, part in self.partials(scanned):
                names.append(name)
                yield in_parts(part) if self.counts_values(name) else part

        path = self.folder / f"partial-{self.pass_number}-{number}.arrow"
        starts = concatenated(tables(), path)
        return {"path": path.name, "parts": [[*n, start] for n, start in zip(names, starts, strict=True)]}

    def partials(self, scanned: Iterable[tuple[LakeRowGroup, TrainRows]]) -> Iterator[tuple[Name, Partial]]:
        """Yield values with their counts at once, for they may be many.

        Other statistics merged, as long as they are small.
        """
        parts: dict[Name, list[Partial]] = {}
        for row_group, rows in scanned:
            for (i, j), statistics in self.requested.items():
                chain = self.workflow.chains[i]
                columns = self._arriving(i, j, row_group, rows)
                for name, statistic in statistics.items():
                    part = aggregate(statistic, columns, chain.steps[j].inputs, rows)
                    if self.counts_values((i, j, name)):
                        yield (i, j, name), part
                    else:
                        pending = parts.setdefault((i, j, name), [])
                        pending.append(part)
                        if sum(p.nbytes for p in pending) > _MERGED_BYTES:
                            # The new part alone may nearly fill an array.
                            if waiting := parts.pop((i, j, name))[:-1]:
                                yield (i, j, name), merge(waiting)
                            yield (i, j, name), part
        yield from ((name, merge(pending)) for name, pending in parts.items())

    def counts_values(self, name: Name) -> bool:
        """Return whether a statistic counts the values of a vocabulary."""
        return isinstance(self.workflow.chains[name[0]].steps[name[1]].op, Categorify)

    def _arriving(self, i: int, j: int, row_group: LakeRowGroup, rows: TrainRows) -> dict[str, DictionaryColumn]:
        """Return the columns of chain i as they arrive at its step j."""
        chain = self.workflow.chains[i]
        columns = {name: row_group.column(name) for name in chain.columns}
        for k, (step, learned) in enumerate(zip(chain.steps[:j], self.learned[i], strict=True)):
            tables = {name: keyed_of(table) for name, table in learned.tables.items()}
            tables |= {name: table.open() for (*place, name), table in self.shared_tables.items() if place == [i, k]}
            identity = rows.training_identity if step.op.out_of_fold else None
            columns = apply_op(step, columns, learned.states, no_lookup, tables.__getitem__, identity)
        return columns


@dataclass(frozen=True)
class SharedKeyedTable:
    """A keyed table in a file that all hosts see. Pickled into tasks."""

    file: Location
    #: Name of the copies: it tells tables of two turns apart, whose files may have equal names.
    name: str
    #: Folder of the copies: one that all tasks see, or one of each host's own.
    host: Location | HostFolder

    def open(self) -> KeyedTable:
        """Return the table, whose columns this host's workers map. Making them takes 16 bytes of memory a key."""
        return _mapped(self.file, of_run_here(self.host) / "handed" / quote(self.name, safe=""))


@lru_cache(maxsize=16)
def _mapped(file: Location, folder: Location) -> KeyedTable:
    return MappedKeyedTable(create_once(folder, partial(_write, file)))


def _write(file: Location, folder: Location) -> None:
    MappedKeyedTable.write_file(file.local_path(), folder)


#: Parts by the highest bits of the hash.
_BITS = 5
#: Tasks do not partition fewer texts than these.
_FEW = 4_096
#: Key in the schema's metadata: JSON list of the parts' offsets, and the end.
_EDGES = b"edges"


def in_parts(counts: Partial, few: int = _FEW) -> Partial:
    """Return counts (`key` text, `rows`, `day`) in the order of parts of the keys' hash; at most `few` as they are."""
    if counts.num_rows <= few:
        return counts
    hashes = xxhash64_strings(one_chunk(counts.column("key"))).view(np.uint64)
    part = (hashes >> np.uint64(64 - _BITS)).astype(np.uint8)
    edges = [0, *np.cumsum(np.bincount(part, minlength=1 << _BITS)).tolist()]
    # One byte is sorted by radix.
    ordered = counts.take(pa.array(np.argsort(part, kind="stable")))
    return ordered.replace_schema_metadata({_EDGES: json.dumps(edges)})


def counted(counts: Sequence[Partial], least: int) -> pa.Table | None:
    """Return (key, rows, day): each text, its rows and its first day; those with at least `least` rows, in any order.

    Args:
        counts: results of `in_parts`.
        least: rows that a text must have.

    Returns:
        None where the native library is not there.
    """
    if not any(_edges(c) for c in counts):
        return counted_texts([_columns(c) for c in counts], least)
    counts = [c if _edges(c) else in_parts(c, 0) for c in counts if c.num_rows]
    columns = [_columns(c) for c in counts]
    edges = [list(pairwise(_edges(c))) for c in counts]
    merged_parts = []
    for part in range(1 << _BITS):
        pieces = [
            (key[start:end], rows[start:end], day[start:end])
            for (key, rows, day), (start, end) in zip(columns, (e[part] for e in edges), strict=True)
            if start < end
        ]
        if pieces:
            merged = counted_texts(pieces, least)
            if merged is None:
                return None
            merged_parts.append(merged)
    return pa.concat_tables(merged_parts).combine_chunks()


def _edges(counts: Partial) -> list[int]:
    """Return the offset of each part and the end of the last; empty where the counts are not in parts."""
    text = (counts.schema.metadata or {}).get(_EDGES)
    return [] if text is None else json.loads(text)


def _columns(counts: Partial) -> tuple[pa.Array, pa.Array, pa.Array]:
    return one_chunk(counts.column("key")), one_chunk(counts.column("rows")), one_chunk(counts.column("day"))


#: Bytes of lake files whose statistics one task merges, and the most such tasks.
_BYTES_A_TASK, _MOST_TASKS = 64 << 20, 2_000
#: In place of a table's number: counts of a file.
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
#: Rows of a batch that is sent to the JVM.
_BATCH_ROWS = 10_000


@dataclass(frozen=True)
class StatisticNumbers:
    """The numbers by which statistics of a pass travel: those of operators, then vocabularies."""

    statistics: tuple[Name, ...]
    vocabularies: tuple[str, ...]

    @staticmethod
    def from_task(task: AggregateTask) -> StatisticNumbers:
        statistics, vocabularies = list[Any](), dict[str, None]()
        for (i, j), requested in task.requested.items():
            op = task.workflow.chains[i].steps[j].op
            for name in requested:
                if isinstance(op, Categorify):
                    vocabularies[op.vocabulary_of(name)] = None
                else:
                    statistics.append((i, j, name))
        return StatisticNumbers(tuple(statistics), tuple(vocabularies))

    def number(self, task: AggregateTask, name: Name) -> int:
        op = task.workflow.chains[name[0]].steps[name[1]].op
        if isinstance(op, Categorify):
            return len(self.statistics) + self.vocabularies.index(op.vocabulary_of(name[2]))
        return self.statistics.index(name)

    def by_key(self, task: AggregateTask) -> list[int]:
        """Return numbers of statistics of which tasks can make tables, key by key."""
        return [
            number
            for number, (i, j, name) in enumerate(self.statistics)
            if is_by_key(task.workflow.chains[i].steps[j], task.requested[i, j][name])
        ]


@dataclass(frozen=True)
class Merged:
    """The statistics of a turn over all files."""

    #: Statistics of operators, without those in `keyed`.
    statistics: Mapping[Name, Partial]
    #: (name string, value string, count bigint, day bigint) of vocabularies; None: no value is counted in this turn.
    values: DataFrame | None
    #: Numbers of statistics that are too large for the driver, and their frame: (name int, statistic binary).
    keyed: Mapping[Name, int]
    partials: DataFrame
    #: Data of the frames, on the executors' disks until `release`.
    persisted: DataFrame | None = None

    def release(self) -> None:
        """Free it: codes have been given and tables made."""
        if self.persisted is not None:
            self.persisted.unpersist()


def scan_merged(rows: LakeRows, spark: SparkSession, task: AggregateTask) -> Merged:
    """Scan lake files as `LakeRows.scan` does where tasks see no common folder: statistics merge on their way."""
    tasks = rows.tasks(spark)
    tables = StatisticNumbers.from_task(task)
    size = sum(file.size for file in rows.files)
    partitions = max(1, min(_MOST_TASKS, max(cores_of(spark), size // _BYTES_A_TASK)))
    send = SendStatistics(ScanTask(tasks, rows.folder, rows.layout, rows.splitter, None), task, tables, partitions)
    receive = MergeStatistics(tables, {n: task.workflow.rules[n] for n in tables.vocabularies})
    by_key = tables.by_key(task)
    with small_batches(spark):
        merged = exchange(spark, len(tasks), send, partitions, receive, _MERGED, rows.hosts_of(tasks))
        again = bool(tables.vocabularies or by_key)
        if again:
            # They are read more than once; a lost executor's part is computed again from the tasks' output.
            merged = merged.persist(StorageLevel.DISK_ONLY)
        partials = merged.where("statistic is not null").select("name", "statistic", "count")
        is_keyed = F.col("name").isin(by_key)
        answers = partials.withColumn("statistic", F.when(~is_keyed, F.col("statistic"))).collect()
        large = sum(r["count"] for r in answers if r.name in by_key) > transport.most_in_driver(spark)
        if by_key and not large:
            answers += partials.where(is_keyed).collect()
    facts = [json.loads(r.statistic) for r in answers if r.name == _FACTS]
    rows.noted(facts)
    executors = executors_of(spark, {f["stage"] for f in facts})
    rows.hosts.update({rows.files[f["file"]].key: executors[f["task"]] for f in facts if f["task"] in executors})
    parts: dict[Name, list[Partial]] = {}
    for r in answers:
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
        {name: merge(partials_of_name) for name, partials_of_name in parts.items()},
        values,
        {tables.statistics[number]: number for number in by_key} if large else {},
        partials.where(is_keyed).select("name", "statistic"),
        merged if again else None,
    )


def merged_by_key(
    spark: SparkSession, folder: Location, files: Sequence[StatisticsFile], tables: StatisticNumbers, size: int
) -> DataFrame:
    """Return statistics that tasks left in a folder which all see, merged: (name int, statistic binary).

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
    """A file of `headrace.features.arrow.scan.concatenated`."""

    name: str
    #: (number of a statistic, its offset).
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SendFiles:
    """Send the statistics of a file to the partitions of their keys. Runs in a task."""

    folder: Location
    files: tuple[StatisticsFile, ...]
    partitions: int

    def __call__(self, task: int) -> Iterator[ExchangedBlock]:
        sender, file = Sender(task), self.files[task]
        for number, start in file.parts:
            partial = table_at(self.folder / file.name, start)
            for partition, groups in by_key(partial, self.partitions, number):
                yield from sender.add(partition, number, groups)
        yield from sender.rest()


@dataclass(frozen=True)
class SendStatistics:
    """Send the statistics of a task's files to the partitions of their keys, and its counts to partition 0.

    Runs in a task.
    """

    scan: ScanTask
    visit: AggregateTask
    tables: StatisticNumbers
    partitions: int

    def __call__(self, task: int) -> Iterator[ExchangedBlock]:
        for scan in self.scan.files(task):
            sender = Sender(scan.number)
            for name, statistic in self.visit.partials(scan.rows()):
                number = self.tables.number(self.visit, name)
                for partition, groups in by_key(statistic, self.partitions, number):
                    yield from sender.add(partition, number, groups)
            yield from sender.rest()
            context = TaskContext.get()
            facts = scan.facts()
            if context is not None:
                facts |= {"stage": context.stageId(), "task": context.taskAttemptId()}
            table = pa.table({"facts": pa.array([json.dumps(facts)])})
            yield sender.block(0, packed(table, _FACTS))


def by_key(partial: Partial, partitions: int, number: int) -> Iterator[tuple[int, Partial]]:
    """Yield the groups of a statistic by partition, all of a key in one; a statistic without text keys in one."""
    if "key" not in partial.column_names or not pa.types.is_string(partial.schema.field("key").type):
        yield number % partitions, partial
        return
    hashes = xxhash64_strings(one_chunk(partial.column("key"))) if partial.num_rows else np.empty(0, np.int64)
    partition_of: npt.NDArray[np.int64] = hashes % partitions
    order = np.argsort(partition_of, kind="stable")
    edges = np.searchsorted(partition_of[order], np.arange(partitions + 1)).tolist()
    ordered = partial.take(pa.array(order)) if partitions > 1 else partial
    for partition in range(partitions):
        start, end = edges[partition : partition + 2]
        if start < end:
            yield partition, ordered.slice(start, end - start)


@dataclass(frozen=True)
class MergeStatistics:
    """Merge what has arrived at a partition (_MERGED). Runs in a task."""

    tables: StatisticNumbers
    rules: Mapping[str, VocabularyRule]

    def __call__(self, blocks: Sequence[ExchangedBlock]) -> Iterator[pa.RecordBatch]:
        parts: dict[int, list[Partial]] = {}
        for block in blocks:
            for number, table in unpacked(block.payload):
                if number == _FACTS:
                    yield _row(_FACTS, table.column(0)[0].as_py().encode())
                else:
                    parts.setdefault(number, []).append(table.replace_schema_metadata(None))
        first = len(self.tables.statistics)
        for number, partials in sorted(parts.items()):
            if number < first:
                for piece in cut(merge(partials)):
                    yield _row(number, packed(piece, number))
                continue
            values = counted_values(partials, self.rules[self.tables.vocabularies[number - first]].min_count)
            yield from _values(number, values)


def counted_values(parts: Sequence[Partial], least: int) -> Partial:
    """Return (key, rows, day) of the values with at least `least` rows."""
    merged = counted(parts, least)
    if merged is None:
        merged = merge(parts)
        merged = merged.filter(pa.array(counts(merged) >= least))
    return merged


def _row(number: int, statistic: bytes) -> pa.RecordBatch:
    """Return a statistic, or what was counted; `count` is its bytes."""
    columns = [[number], [None], [len(statistic)], [None], [statistic]]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, _MERGED_SCHEMA, strict=True)], schema=_MERGED_SCHEMA
    )


def _values(number: int, values: Partial) -> Iterator[pa.RecordBatch]:
    n = values.num_rows
    table = pa.table(
        [
            pa.array(np.full(n, number, np.int32)),
            values.column("key"),
            values.column("rows"),
            values.column("day"),
            pa.nulls(n, pa.binary()),
        ],
        schema=_MERGED_SCHEMA,
    )
    yield from table.to_batches(_BATCH_ROWS)
