"""Writing a dataset: rows in an order of their own, files and row groups of even size, counts along the way.

A row's place depends on its identity (source file and line) alone: a hash of it says which file of its split it goes
to and where in the file it stands. So the files are the same bits however Spark cut the work, and the order has
nothing to do with label, user or time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.spark_plan import col, is_missing
from headrace.features.split import SPLIT
from headrace.features.workflow import FittedWorkflow, physical_schema
from headrace.schema import NULL_CODE, OOV_CODE, DatasetSchema, Kind

_LOG = logging.getLogger("headrace.features")

Engine = Literal["spark", "arrow"]

#: Row groups in a file of a large split: a file is what a task holds in memory.
_GROUPS_A_FILE = 4
#: A split of this many rows is cut into a few files, so that a few cores can work at it.
_ROWS_WORTH_A_FILE = 20_000
_FEW_FILES = 4


@dataclass(frozen=True)
class FilePlan:
    """One Parquet file to write."""

    #: Relative to the dataset's folder.
    name: str
    split: str
    groups: int
    #: Most rows of a row group.
    group_rows: int


@dataclass
class ColumnCounts:
    """What is counted of a feature's values."""

    #: Rows without a value in the lake: null, NaN, an empty list.
    missing: int = 0
    #: Codes that are 1, and codes that are not 0.
    oov: int = 0
    coded: int = 0


@dataclass
class Written:
    """A file that is there, or the sum of several."""

    name: str
    rows: int
    row_groups: int
    size: int
    columns: dict[str, ColumnCounts] = field(default_factory=dict)


def plan_files(counts: Mapping[str, int], row_group_rows: int, min_row_groups: int) -> list[FilePlan]:
    """Files of each split, so many that all row groups are about even, none above `row_group_rows`.

    Rows fall into files by hash, so a file of several has about rows/files of them, give or take a few square roots.
    """
    plans = []
    for split, rows in counts.items():
        if not rows:
            continue
        files = max(math.ceil(rows / (_GROUPS_A_FILE * row_group_rows)), min(_FEW_FILES, rows // _ROWS_WORTH_A_FILE), 1)
        each = rows / files
        fullest = each + 6 * math.sqrt(each) if files > 1 else each
        groups = max(math.ceil(fullest / row_group_rows), math.ceil(min(min_row_groups, rows) / files))
        plans += [FilePlan(f"{split}/part-{i:05d}.parquet", split, groups, row_group_rows) for i in range(files)]
    return plans


def write_dataset(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], folder: Path, workflow: Path, engine: Engine
) -> list[Written]:
    """Transform the rows of all splits and write them, in one pass over the rows.

    Args:
        rows: events with `__split`, `_source_file`, `_source_line`.
        plans: from `plan_files`, in which every split of `rows` has a file.
        folder: the dataset's (partial) folder, which the executors see too.
        workflow: `fitted`, saved: where executors load it from.
    """
    for split in {p.split for p in plans}:
        (folder / split).mkdir(parents=True, exist_ok=True)
    w = fitted.workflow
    carried = {f"__carried{i}": name for i, name in enumerate(w.carried_columns)}
    meta = [
        col(w.label_column).cast("float").alias("__label"),
        *[col(source).alias(name) for name, source in carried.items()],
        F.col(SPLIT),
        F.xxhash64("_source_file", "_source_line").alias("__hash"),
        F.col("_source_file").alias("__source_file"),
        F.col("_source_line").alias("__source_line"),
    ]
    frame = rows.select(*[col(c) for c in w.input_columns], *meta)
    if engine == "spark":
        flags = {c: f"__missing{i}" for i, c in enumerate(w.input_columns)}
        frame = frame.select("*", *[is_missing(c, w.input_type(c)).alias(flag) for c, flag in flags.items()])
        keep = ["__label", *carried, SPLIT, "__hash", "__source_file", "__source_line", *flags.values()]
        frame = fitted.transform(frame, keep=keep)
    frame = frame.withColumn("__file", _file_of(plans)).drop(SPLIT)
    keys = F.array(*[F.lit(k) for k in partition_keys(len(plans))])
    frame = (
        frame.repartition(len(plans), F.element_at(keys, F.col("__file") + 1))
        .sortWithinPartitions("__file", "__hash", "__source_file", "__source_line")
        .drop("__hash", "__source_file", "__source_line")
    )
    task = _Task(tuple(plans), str(folder), str(workflow), engine, tuple(carried), tuple(frame.columns))
    # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
    found = numbered.mapInArrow(task.run, "written string").collect()
    return sorted((_written(json.loads(r[0])) for r in found), key=lambda f: f.name)


def _file_of(plans: list[FilePlan]) -> Column:
    """A row's file: its index in `plans`."""
    out: Column | None = None
    for split in dict.fromkeys(p.split for p in plans):
        mine = [i for i, p in enumerate(plans) if p.split == split]
        index = (F.lit(mine[0]) + F.pmod(F.col("__hash"), F.lit(len(mine)).cast("bigint"))).cast("int")
        out = F.when(F.col(SPLIT) == split, index) if out is None else out.when(F.col(SPLIT) == split, index)
    assert out is not None
    return out


def partition_keys(partitions: int) -> list[int]:
    """For each partition an int that Spark's hash partitioning puts there: so that each file has a task of its own.

    Without it files share tasks at random, and the longest task decides. The result is the same either way.
    """
    keys: dict[int, int] = {}
    candidate = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(candidate) % partitions, candidate)
        candidate += 1
    return [keys[i] for i in range(partitions)]


def _murmur3(x: int) -> int:
    """Spark's `hash` of an int: Murmur3 x86 32 (Appleby), seed 42; a signed number."""
    mask = 0xFFFFFFFF

    def rotl(v: int, r: int) -> int:
        return ((v << r) | (v >> (32 - r))) & mask

    k = rotl(x * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotl(42 ^ k, 13) * 5 + 0xE6546B64) & mask
    h ^= 4
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


@dataclass(frozen=True)
class _Task:
    """What runs on an executor: sorted batches in, Parquet files out."""

    plans: tuple[FilePlan, ...]
    folder: str
    workflow: str
    engine: Engine
    carried: tuple[str, ...]
    #: Of the batches' columns, in order.
    names: tuple[str, ...]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fitted = _loaded(self.workflow)
        index, missing = -1, dict.fromkeys(fitted.input_columns, 0)
        parts: list[pa.RecordBatch] = []
        for numbered in batches:
            whole = pa.RecordBatch.from_arrays(numbered.columns, names=list(self.names))
            files = whole.column(whole.schema.get_field_index("__file")).to_numpy()
            edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
            for start, end in pairwise(edges):
                if start == end:
                    continue
                if files[start] != index:
                    if parts:
                        yield self._write(fitted, index, parts, missing)
                    index, parts, missing = int(files[start]), [], dict.fromkeys(fitted.input_columns, 0)
                batch = whole.slice(start, end - start)
                parts.append(self._transform(fitted, batch))
                for i, name in enumerate(fitted.input_columns):
                    missing[name] += self._missing(fitted, batch, i, name)
        if parts:
            yield self._write(fitted, index, parts, missing)

    def _transform(self, fitted: FittedWorkflow, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = physical_schema(fitted.schema.features)
        if self.engine == "arrow":
            made = fitted.transform_batch(batch).columns
        else:
            made = [batch.column(batch.schema.get_field_index(c)) for f in fitted.features for c in f.physical]
        rest = [batch.column(batch.schema.get_field_index(c)) for c in ("__label", *self.carried)]
        return pa.RecordBatch.from_arrays([*made, *rest], schema=schema)

    def _missing(self, fitted: FittedWorkflow, batch: pa.RecordBatch, i: int, name: str) -> int:
        if self.engine == "arrow":
            return fitted.missing(batch, name)
        return int(np.count_nonzero(batch.column(batch.schema.get_field_index(f"__missing{i}")).to_numpy(False)))

    def _write(
        self, fitted: FittedWorkflow, index: int, parts: list[pa.RecordBatch], missing: Mapping[str, int]
    ) -> pa.RecordBatch:
        plan = self.plans[index]
        table = pa.Table.from_batches(parts)
        rows = table.num_rows
        groups = min(max(plan.groups, math.ceil(rows / plan.group_rows)), rows)
        edges = [rows * i // groups for i in range(groups + 1)]
        path = Path(self.folder) / plan.name
        # A task may run twice; the last rename wins, and both wrote the same.
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        with pq.ParquetWriter(partial, table.schema, compression="none", use_dictionary=False) as writer:
            for start, end in pairwise(edges):
                writer.write_table(table.slice(start, end - start), row_group_size=end - start)
        size = partial.stat().st_size
        os.replace(partial, path)
        written = {
            "name": plan.name, "rows": rows, "row_groups": groups, "size": size,
            "columns": {n: c.__dict__ for n, c in _count(fitted.schema, table, missing).items()},
        }  # fmt: skip
        return pa.RecordBatch.from_pydict({"written": [json.dumps(written)]})


def _count(schema: DatasetSchema, table: pa.Table, missing: Mapping[str, int]) -> dict[str, ColumnCounts]:
    out = {name: ColumnCounts(missing=number) for name, number in missing.items()}
    for feature in schema.of(Kind.CATEGORICAL):
        for column in feature.physical:
            codes = table.column(column).to_numpy()
            out[feature.name].coded += int(np.count_nonzero(codes != NULL_CODE))
            if feature.vocabulary is not None:
                out[feature.name].oov += int(np.count_nonzero(codes == OOV_CODE))
    return out


@lru_cache(maxsize=2)
def _loaded(folder: str) -> FittedWorkflow:
    """A worker process serves many tasks: it reads the vocabularies and builds their indexes once."""
    return FittedWorkflow.load(Path(folder))


def _written(data: dict[str, Any]) -> Written:
    columns = {name: ColumnCounts(**counts) for name, counts in data.pop("columns").items()}
    return Written(**data, columns=columns)
