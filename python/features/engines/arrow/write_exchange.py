"""The Arrow engine's write where hosts share no folder: a part's rows come to its task through Spark's shuffle.

Each row group is transformed where it was decoded, and its rows of each part are sent as Arrow tables. So nobody opens
what another one holds, and Spark has made again what a lost executor held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.features.engines.arrow.dictionary import DictionaryColumn
from headrace.features.engines.arrow.host_folder import HostFolder
from headrace.features.engines.arrow.lake_file import FILE, HASH, LINE, RowGroupLayout, row_groups
from headrace.features.engines.arrow.lake_rows import FileTasks, LakeRows, Splitter
from headrace.features.engines.arrow.part_rows import EDGES, PartRows, gathered, placed
from headrace.features.engines.arrow.row_order import row_order
from headrace.features.engines.arrow.task_workflow import mapped, without_values
from headrace.features.engines.arrow.transform import transformed
from headrace.features.engines.arrow.write_frame import write_part, written_dataset
from headrace.features.engines.blocks import Sender, unpacked
from headrace.features.layout.files import FilePlan, WrittenDataset, source_sets
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.schema import stored_schema
from headrace.lake.spark.exchange import Block, exchange, small_batches
from headrace.storage import Location

#: Instead of a table's number: rows that lack a value, of each of `source_sets`.
_MISSING, _ROWS = 0, 1


def write_exchanged(
    rows: LakeRows, plans: list[FilePlan], folder: Location, workflow: Location, spark: SparkSession
) -> WrittenDataset:
    """`write_lake_rows` through Spark's shuffle: the same files, bit for bit."""
    assert isinstance(rows.folder, HostFolder)
    tasks = rows.tasks(spark)
    send = SendRows(tasks, rows.folder, rows.layout, rows.splitter, workflow, tuple(plans))
    receive = WritePart(tuple(plans), folder, workflow)
    with small_batches(spark):
        parts = exchange(spark, len(tasks), send, len(plans), receive, "written string", rows.hosts_of(tasks))
        found = [json.loads(text) for (text,) in parts.collect()]
    return written_dataset(plans, found)


@dataclass(frozen=True)
class SendRows:
    """In a task: the rows of its files, transformed, to their parts."""

    tasks: FileTasks
    folder: HostFolder
    layout: RowGroupLayout
    splitter: Splitter
    workflow: Location
    plans: tuple[FilePlan, ...]

    def __call__(self, task: int) -> Iterator[Block]:
        fitted = mapped(self.workflow, self.folder.of_run() / "maps")
        for number, file in self.tasks[task]:
            sender = Sender(number)
            for row_group in row_groups(file, self.folder, self.layout)[0]:
                arrays = transformed(fitted, row_group, self.splitter, self.plans)
                if arrays is None:
                    continue
                edges = arrays[EDGES].tolist()
                for part, (start, end) in enumerate(pairwise(edges)):
                    if start == end:
                        continue
                    mine = PartRows(row_group, part, start, end, arrays)
                    missing = pa.table({"missing": mine.missing(len(source_sets(fitted)))})
                    yield from sender.add(part, _MISSING, missing)
                    for piece in mine.pieces(fitted.workflow.carried_columns):
                        yield from sender.add(part, _ROWS, table_of(fitted, piece))
            yield from sender.rest()


def table_of(fitted: FittedWorkflow, rows: PartRows) -> pa.Table:
    """Rows as they are stored, with what they are ordered by: their hash, file and line."""
    everything = np.arange(len(rows.rows), dtype=np.int32)
    stored = stored_schema(fitted.schema.features)
    columns: list[pa.Array] = []
    for feature in fitted.features:
        if feature.is_list:
            columns.append(rows.output_lists(feature))
        else:
            columns.append(placed([rows.output(feature)], [everything]))
    columns.append(placed([rows.label(fitted.workflow.label_column)], [everything]))
    for name in fitted.workflow.carried_columns:
        columns.append(rows.column(name).decode().cast(stored.field(len(columns)).type))
    order = {
        HASH: pa.array(rows.hashes),
        FILE: rows.column(FILE).decode().cast(pa.string()).dictionary_encode(),
        LINE: rows.column(LINE).decode(),
    }
    # Numbers for names: a feature may be called as one of those.
    names = [*map(str, range(len(columns))), *order]
    return pa.table([*columns, *order.values()], names=names)


@dataclass(frozen=True)
class WritePart:
    """In a task: the rows of a part, put in their order and written."""

    plans: tuple[FilePlan, ...]
    folder: Location
    workflow: Location

    def __call__(self, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        fitted = without_values(self.workflow)
        sets = source_sets(fitted)
        missing, tables = np.zeros(len(sets), np.int64), list[pa.Table]()
        for block in blocks:
            for name, table in unpacked(block.payload):
                if name == _MISSING:
                    missing += table.column(0).to_numpy()
                else:
                    tables.append(table.combine_chunks())
        counts = dict(zip(sets, missing.tolist(), strict=True))
        plan = self.plans[blocks[0].partition]
        table = in_order(fitted, tables)
        written = write_part(fitted.schema, plan, self.folder, table, counts)
        yield pa.RecordBatch.from_pydict({"written": [json.dumps(written)]})


@dataclass(frozen=True)
class _Sent:
    """Rows that came."""

    table: pa.Table

    def column(self, name: str) -> DictionaryColumn:
        found = self.table.column(name).chunk(0)
        if pa.types.is_dictionary(found.type):
            return DictionaryColumn(found.dictionary, _indices(found))
        return DictionaryColumn(found)


def _indices(column: pa.DictionaryArray) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = column.indices.to_numpy(zero_copy_only=False)
    return found


def in_order(fitted: FittedWorkflow, tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of tables that `table_of` made, in the order of the dataset's."""
    hashes = np.concatenate([t.column(HASH).to_numpy() for t in tables])
    sources = [(_Sent(t), np.arange(t.num_rows, dtype=np.int32)) for t in tables]
    order = row_order(hashes, sources).rows
    stored = stored_schema(fitted.schema.features)
    columns = [
        gathered([DictionaryColumn(t.column(i).chunk(0)) for t in tables], order, field.type)
        for i, field in enumerate(stored)
    ]
    return pa.Table.from_arrays(columns, schema=stored)
