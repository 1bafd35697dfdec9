"""The Arrow engine's write from row groups of lake files: no row passes through Spark, no text is transformed twice.

First each row group: which part of the dataset its rows belong to, what its distinct values become (a code or a number
each), and of each row, part by part, which of them it has. Then each part: its rows of every row group, which lie there
one behind the other, merged in the order of the rows' hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.features.engines.arrow import kernels
from headrace.features.engines.arrow.array_file import load_part, save_arrays
from headrace.features.engines.arrow.host_folder import HostFolder
from headrace.features.engines.arrow.lake_file import LakeRowGroup, RowGroupLayout, row_groups
from headrace.features.engines.arrow.lake_rows import FileTasks, LakeRows, Splitter
from headrace.features.engines.arrow.part_rows import EDGES, HASHES, PartRows, by_part, gathered, placed
from headrace.features.engines.arrow.row_order import row_order
from headrace.features.engines.arrow.task_workflow import mapped, without_values
from headrace.features.engines.arrow.transform import transformed
from headrace.features.engines.arrow.write_exchange import write_exchanged
from headrace.features.engines.arrow.write_frame import write_part, written_dataset
from headrace.features.layout.files import FilePlan, WrittenDataset, source_sets
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.schema import stored_schema
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Location

Array = npt.NDArray[Any]


def write_lake_rows(
    fitted: FittedWorkflow,
    rows: LakeRows,
    plans: list[FilePlan],
    folder: Location,
    workflow: Location,
    spark: SparkSession | None,
) -> WrittenDataset:
    """Transform the rows of all splits and write them; see `headrace.features.build.run.write_dataset`.

    The same files as from a frame, bit for bit. A task holds the results of one row group, or the rows of one part.
    """
    for split in {p.split for p in plans}:
        (folder / split).make_dir()
    if isinstance(rows.folder, HostFolder):
        assert spark is not None
        return write_exchanged(rows, plans, folder, workflow, spark)
    tasks, decoded = rows.tasks(spark), rows.folder
    transform_task = _TransformTask(tasks, decoded, rows.layout, rows.splitter, workflow, rows.scratch, tuple(plans))
    found = sorted(run_tasks(spark, len(tasks), transform_task), key=lambda f: f["file"])
    placed = tuple(
        (decoded / row_group, rows.scratch / outputs) for f in found for row_group, outputs in f["row_groups"]
    )
    parts = run_tasks(spark, len(plans), _WriteTask(placed, tuple(plans), folder, workflow))
    for _, outputs in placed:  # so that the dataset does not wait for them on its way to the disk
        outputs.remove_quietly()
    return written_dataset(plans, parts)


@dataclass(frozen=True)
class _TransformTask:
    """The second pass, in a task: of each row group the order of its rows by part, and what its values become."""

    tasks: FileTasks
    folder: Location
    layout: RowGroupLayout
    splitter: Splitter
    workflow: Location
    scratch: Location
    plans: tuple[FilePlan, ...]

    def __call__(self, task: int) -> Iterator[dict[str, Any]]:
        fitted = mapped(self.workflow, self.scratch / "maps")
        for number, file in self.tasks[task]:
            out = []
            for i, row_group in enumerate(row_groups(file, self.folder, self.layout)[0]):
                arrays = transformed(fitted, row_group, self.splitter, self.plans)
                if arrays is None:
                    continue
                path = self.scratch / f"outputs-{number}-{i}.arrays"
                cut = by_part(arrays, fitted.workflow.label_column)
                save_arrays(path, {n: a for n, a in arrays.items() if n not in cut}, cut, arrays[EDGES])
                out.append([row_group.path.below(self.folder), path.name])
            yield {"file": number, "row_groups": out}


@dataclass(frozen=True)
class _WriteTask:
    """The third pass, in a task: one part, its rows from every row group."""

    #: Paths of row groups and of what `_TransformTask` left of them.
    row_groups: tuple[tuple[Location, Location], ...]
    plans: tuple[FilePlan, ...]
    folder: Location
    workflow: Location

    def __call__(self, part: int) -> Iterator[dict[str, Any]]:
        fitted = without_values(self.workflow)
        sources: list[PartRows] = []
        for row_group, outputs in self.row_groups:
            arrays = load_part(outputs, part)
            if arrays is not None:
                sources.append(PartRows(LakeRowGroup(row_group), part, 0, len(arrays[HASHES]), arrays))
        if not sources:
            yield {"split": self.plans[part].split, "day": self.plans[part].day, "files": [], "counts": {}}
            return
        hashes = np.concatenate([s.hashes for s in sources])
        order = row_order(hashes, [(s.row_group, s.rows) for s in sources]).rows
        places = np.empty(len(order), np.int32)
        kernels.scatter(np.arange(len(order), dtype=np.int32), None, order, places)
        starts = np.cumsum([0, *(len(s.rows) for s in sources)])
        cut = [places[start:end] for start, end in pairwise(starts)]
        columns: list[pa.Array] = []
        for feature in fitted.features:
            if feature.is_list:
                columns.append(pa.concat_arrays([s.output_lists(feature) for s in sources]).take(pa.array(order)))
            else:
                columns.append(placed([s.output(feature) for s in sources], cut))
        columns.append(placed([s.label(fitted.workflow.label_column) for s in sources], cut))
        stored = stored_schema(fitted.schema.features)
        for name in fitted.workflow.carried_columns:
            columns.append(gathered([s.column(name) for s in sources], order, stored.field(len(columns)).type))
        sets = source_sets(fitted)
        missing = dict(zip(sets, np.sum([s.missing(len(sets)) for s in sources], 0).tolist(), strict=True))
        table = pa.Table.from_arrays(columns, schema=stored)
        yield write_part(fitted.schema, self.plans[part], self.folder, table, missing)
