"""The Arrow engine's write: Spark brings the rows of a file to one task, which transforms and writes them in Arrow."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import DataFrame

from headrace.features.spark_plan import col
from headrace.features.workflow import FittedWorkflow, physical_schema
from headrace.features.writer import ColumnCounts, Engine, FilePlan, Written, carried_columns, identity, placed
from headrace.schema import NULL_CODE, OOV_CODE, DatasetSchema, Kind


def write(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], folder: Path, workflow: Path
) -> list[Written]:
    """See `headrace.features.writer.write_dataset`."""
    w = fitted.workflow
    frame = rows.select(*[col(c) for c in w.input_columns], *identity(w))
    return write_in_tasks(placed(frame, plans), plans, folder, workflow, "arrow", tuple(carried_columns(w)))


def write_in_tasks(
    frame: DataFrame, plans: list[FilePlan], folder: Path, workflow: Path, engine: Engine, carried: tuple[str, ...]
) -> list[Written]:
    """Write rows that `placed` brought together."""
    task = _Task(tuple(plans), str(folder), str(workflow), engine, carried, tuple(frame.columns))
    # mapInArrow reads a dot in a column's name as a field's: numbers travel, the task puts the names back.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
    found = numbered.mapInArrow(task.run, "written string").collect()
    return sorted((_written(json.loads(r[0])) for r in found), key=lambda f: f.name)


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
        index, missing = -1, dict.fromkeys(_source_sets(fitted), 0)
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
                    index, parts, missing = int(files[start]), [], dict.fromkeys(missing, 0)
                batch = whole.slice(start, end - start)
                parts.append(self._transform(fitted, batch))
                rows = {name: self._missing(fitted, batch, i, name) for i, name in enumerate(fitted.input_columns)}
                for sources in missing:
                    missing[sources] += int(np.count_nonzero(np.logical_or.reduce([rows[name] for name in sources])))
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

    def _missing(self, fitted: FittedWorkflow, batch: pa.RecordBatch, i: int, name: str) -> NDArray[np.bool_]:
        if self.engine == "arrow":
            return fitted.missing(batch, name)
        return np.asarray(batch.column(batch.schema.get_field_index(f"__missing{i}")).to_numpy(False), np.bool_)

    def _write(
        self, fitted: FittedWorkflow, index: int, parts: list[pa.RecordBatch], missing: Mapping[tuple[str, ...], int]
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


def _source_sets(fitted: FittedWorkflow) -> tuple[tuple[str, ...], ...]:
    """What the features are made of, each set once: far fewer than features where one column gives many."""
    return tuple(dict.fromkeys(f.sources for f in fitted.features))


def _count(schema: DatasetSchema, table: pa.Table, missing: Mapping[tuple[str, ...], int]) -> dict[str, ColumnCounts]:
    fed = (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))
    out = {f.name: ColumnCounts(missing=missing[f.sources]) for f in fed}
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
