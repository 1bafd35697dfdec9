"""The writer of parts: a part's rows, transformed and in order, become Parquet files and counts of their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.schema import OOV_CODE, DatasetSchema, Kind
from headrace.features.layout.files import ColumnCounts, DatasetFile, FilePlan, WrittenDataset
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location


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
