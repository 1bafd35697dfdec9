"""The Arrow engine's write: Spark brings the rows of a part to one task, which transforms and writes them in Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from headrace.config.schema import OOV_CODE, DatasetSchema, Kind
from headrace.features.arrow.decode import of_run_here
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.files import (
    ColumnCounts,
    DatasetFile,
    FilePlan,
    WrittenDataset,
    carried_columns,
    source_sets,
)
from headrace.features.layout.split import identity, placed
from headrace.features.workflow.fitted import FittedWorkflow, stored_schema
from headrace.lake.spark.exchange import bounded_batches
from headrace.storage import Location
from headrace.storage.host_scratch import RunFolder


def write(
    fitted: FittedWorkflow,
    rows: DataFrame,
    plans: list[FilePlan],
    folder: Location,
    workflow: Location,
    of_run: Location | RunFolder,
) -> WrittenDataset:
    """See `headrace.features.build.run.write_dataset`; `of_run`: a folder of this run alone, for what workers map."""
    w = fitted.workflow
    frame = placed(rows.select(*[col(c) for c in w.input_columns], *identity(w)), plans)
    task = _Task(tuple(plans), folder, workflow, of_run, tuple(carried_columns(w)), tuple(frame.columns))
    # Columns are numbered: mapInArrow takes a dot in a name for the separator of a field. The task restores the names.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
    # A column of a batch holds 2 GiB of texts, so batches with long ones must be short.
    varying = any(t.is_list or t.element == "string" for t in map(w.input_type, (*w.input_columns, *w.carried_columns)))
    with bounded_batches(rows.sparkSession) if varying else nullcontext():
        answers = numbered.mapInArrow(task.run, "written string").collect()
    return written_dataset(plans, (json.loads(text) for (text,) in answers))


@dataclass(frozen=True)
class _Task:
    """Transform sorted batches and write Parquet files. Runs on an executor."""

    plans: tuple[FilePlan, ...]
    folder: Location
    workflow: Location
    of_run: Location | RunFolder
    carried: tuple[str, ...]
    #: Names of the batches' columns, in order.
    names: tuple[str, ...]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fitted = mapped(self.workflow, of_run_here(self.of_run) / "maps")
        index, missing = -1, dict.fromkeys(source_sets(fitted), 0)
        done: list[pa.RecordBatch] = []
        for numbered in batches:
            named_batch = pa.RecordBatch.from_arrays(numbered.columns, names=list(self.names))
            parts = named_batch.column(named_batch.schema.get_field_index("__part")).to_numpy()
            edges = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
            for start, end in pairwise(edges):
                if start == end:
                    continue
                if parts[start] != index:
                    if done:
                        yield self._write(fitted, index, done, missing)
                    index, done, missing = int(parts[start]), [], dict.fromkeys(missing, 0)
                batch = named_batch.slice(start, end - start)
                done.append(self._transform(fitted, batch))
                rows = {name: fitted.missing(batch, name) for name in fitted.input_columns}
                for sources in missing:
                    missing[sources] += int(np.count_nonzero(np.logical_or.reduce([rows[name] for name in sources])))
        if done:
            yield self._write(fitted, index, done, missing)

    def _transform(self, fitted: FittedWorkflow, batch: pa.RecordBatch) -> pa.RecordBatch:
        rest = [batch.column(batch.schema.get_field_index(c)) for c in ("__label", *self.carried)]
        arrays = fitted.transform_lists(batch)
        return pa.RecordBatch.from_arrays([*arrays, *rest], schema=stored_schema(fitted.schema.features))

    def _write(
        self, fitted: FittedWorkflow, index: int, done: list[pa.RecordBatch], missing: Mapping[tuple[str, ...], int]
    ) -> pa.RecordBatch:
        written = write_part(fitted.schema, self.plans[index], self.folder, pa.Table.from_batches(done), missing)
        return pa.RecordBatch.from_pydict({"written": [json.dumps(written)]})


def write_part(
    schema: DatasetSchema, plan: FilePlan, folder: Location, table: pa.Table, missing: Mapping[tuple[str, ...], int]
) -> dict[str, Any]:
    """Write the files of a part.

    Args:
        table: its rows in order (`stored_schema`).
        missing: by `source_sets`, rows that lack a value of one of these columns.

    Returns:
        What `written_dataset` puts together: JSON values.
    """
    rows = table.num_rows
    groups = plan.groups_of(rows)
    edges = [rows * i // groups for i in range(groups + 1)]
    files = []
    for group, (start, end) in enumerate(pairwise(edges)):
        path = folder / plan.file(group)
        # A task may run twice; the last rename wins, and both wrote equal files.
        with (
            path.new_file() as partial,
            pq.ParquetWriter(partial, table.schema, compression="none", use_dictionary=False) as writer,
        ):
            # Parquet may split pages where a column has several chunks.
            writer.write_table(table.slice(start, end - start).combine_chunks(), row_group_size=end - start)
        path.start_writeback()
        files.append({"name": plan.file(group), "rows": end - start, "row_groups": 1, "size": path.size()})
    counts = {name: asdict(c) for name, c in _count(schema, table, missing).items()}
    return {"split": plan.split, "day": plan.day, "files": files, "counts": counts}


def written_dataset(plans: list[FilePlan], parts: Iterable[Mapping[str, Any]]) -> WrittenDataset:
    """Return the parts' files and counts together."""
    files: list[DatasetFile] = []
    counts: dict[str, dict[str, ColumnCounts]] = {p.split: {} for p in plans}
    days: dict[str, tuple[list[DatasetFile], dict[str, ColumnCounts]]] = {p.day: ([], {}) for p in plans if p.day}
    for part in parts:
        part_files = [DatasetFile(**file) for file in part["files"]]
        files += part_files
        sums = [counts[part["split"]]]
        if part["day"]:
            days[part["day"]][0].extend(part_files)
            sums.append(days[part["day"]][1])
        for name, part_counts in part["counts"].items():
            for sum_ in sums:
                sum_[name] = sum_.get(name, ColumnCounts()) + ColumnCounts(**part_counts)
    return WrittenDataset(sorted(files, key=lambda f: f.name), counts, days)


def _count(schema: DatasetSchema, table: pa.Table, missing: Mapping[tuple[str, ...], int]) -> dict[str, ColumnCounts]:
    fed = (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))
    out = {f.name: ColumnCounts(missing=missing[f.sources]) for f in fed}
    for feature in schema.of(Kind.CATEGORICAL):
        column = table.column(feature.name).combine_chunks()
        codes = (column.flatten() if feature.is_list else column).to_numpy()
        out[feature.name].coded += int(np.count_nonzero(codes))  # NULL_CODE is 0
        if feature.vocabulary is not None:
            is_oov = codes == OOV_CODE
            if feature.first_code > OOV_CODE + 1:
                is_oov = (codes >= OOV_CODE) & (codes < feature.first_code)
            out[feature.name].oov += int(np.count_nonzero(is_oov))
    return out


@lru_cache(maxsize=2)
def mapped(workflow: Location, maps: Location) -> FittedWorkflow:
    """Return the workflow to transform with: all workers of the host map its large vocabularies and keyed tables.

    Args:
        workflow: where it is saved.
        maps: of this workflow alone, on this host or where all hosts see it; made where it is not there yet.
    """
    return FittedWorkflow.load(workflow, maps=maps)


@lru_cache(maxsize=2)
def without_values(workflow: Location) -> FittedWorkflow:
    """Return the workflow to write transformed rows with: no vocabulary is in memory."""
    return FittedWorkflow.load(workflow, most_values=0)
