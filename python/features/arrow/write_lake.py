"""The Arrow engine's write from row groups of lake files: no row passes through the JVM, no text is transformed twice.

First each row group: which part of the dataset its rows belong to, what its distinct values become (a code or a number
each), and of each row, part by part, which of them it has. Then each part: its rows of every row group, merged in the
order of the rows' hashes. Between the two the rows travel in one of two ways, with the same files, bit for bit:

- Through a folder that all tasks see, as files of NumPy arrays. The arrays whose rows belong to parts lie in the file
  as blocks: all values of one part in one piece, which a reader of that part reads at once. Were each array in one
  piece, a part's few kilobytes of each would stand far from each other, and the kernel reads 128 KiB ahead for each: of
  files larger than the page cache, forty times what is needed. The other arrays are mapped into memory.
- Through Spark's shuffle, as Arrow tables, where hosts share no folder. So no task opens a file of another host, and
  Spark computes again what a lost executor held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.features.arrow import kernels
from headrace.features.arrow.decode import FILE, HASH, LINE, HostFolder, LakeRowGroup, RowGroupLayout, row_groups
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.arrow.scan import FileTasks, LakeRows, Splitter
from headrace.features.arrow.transform import EDGES, HASHES, PartRows, by_part, gathered, placed, row_order, transformed
from headrace.features.arrow.write import mapped, without_values, write_part, written_dataset
from headrace.features.layout.files import FilePlan, WrittenDataset, source_sets
from headrace.features.transport import Sender, unpacked
from headrace.features.workflow.fitted import FittedWorkflow, stored_schema
from headrace.lake.spark.exchange import ExchangedBlock, exchange, small_batches
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
    """Transform the rows of all splits and write them.

    A task holds the results of one row group, or the rows of one part.

    Args:
        rows: the files, scanned (`LakeRows.scan`).
        plans: from `plan_files`, in which every split of `rows` has a part.
        folder: the dataset's (partial) folder, which all tasks see.
        workflow: `fitted`, saved: where tasks load it from.
        spark: schedules the tasks; None: they run in this process.
    """
    for split in {p.split for p in plans}:
        (folder / split).make_dir()
    if isinstance(rows.folder, HostFolder):
        assert spark is not None
        return write_exchanged(rows, plans, folder, workflow, spark)
    tasks, decoded = rows.tasks(spark), rows.folder
    transform_task = _TransformTask(tasks, decoded, rows.layout, rows.splitter, workflow, rows.scratch, tuple(plans))
    transformed_files = sorted(run_tasks(spark, len(tasks), transform_task), key=lambda f: f["file"])
    placed = tuple(
        (decoded / row_group, rows.scratch / outputs)
        for f in transformed_files
        for row_group, outputs in f["row_groups"]
    )
    parts = run_tasks(spark, len(plans), _WriteTask(placed, tuple(plans), folder, workflow))
    for _, outputs in placed:  # so that syncing the dataset does not write them to the disk
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

    #: Paths of row groups and of the outputs of `_TransformTask` for them.
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


#: In place of a table's number: counts of rows that lack a value, by `source_sets`.
_MISSING, _ROWS = 0, 1


def write_exchanged(
    rows: LakeRows, plans: list[FilePlan], folder: Location, workflow: Location, spark: SparkSession
) -> WrittenDataset:
    """Write as `write_lake_rows` does, through Spark's shuffle: the same files, bit for bit."""
    assert isinstance(rows.folder, HostFolder)
    tasks = rows.tasks(spark)
    send = SendRows(tasks, rows.folder, rows.layout, rows.splitter, workflow, tuple(plans))
    receive = WritePart(tuple(plans), folder, workflow)
    with small_batches(spark):
        parts = exchange(spark, len(tasks), send, len(plans), receive, "written string", rows.hosts_of(tasks))
        written_parts = [json.loads(text) for (text,) in parts.collect()]
    return written_dataset(plans, written_parts)


@dataclass(frozen=True)
class SendRows:
    """Transform the rows of a task's files and send them to their parts. Runs in a task."""

    tasks: FileTasks
    folder: HostFolder
    layout: RowGroupLayout
    splitter: Splitter
    workflow: Location
    plans: tuple[FilePlan, ...]

    def __call__(self, task: int) -> Iterator[ExchangedBlock]:
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
                    part_rows = PartRows(row_group, part, start, end, arrays)
                    missing = pa.table({"missing": part_rows.missing(len(source_sets(fitted)))})
                    yield from sender.add(part, _MISSING, missing)
                    for piece in part_rows.pieces(fitted.workflow.carried_columns):
                        yield from sender.add(part, _ROWS, table_of(fitted, piece))
            yield from sender.rest()


def table_of(fitted: FittedWorkflow, rows: PartRows) -> pa.Table:
    """Return rows as they are stored, with what they are ordered by: their hash, file and line."""
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
    # Columns are numbered, since a feature may have one of those names.
    names = [*map(str, range(len(columns))), *order]
    return pa.table([*columns, *order.values()], names=names)


@dataclass(frozen=True)
class WritePart:
    """Write the rows of a part, in their order. Runs in a task."""

    plans: tuple[FilePlan, ...]
    folder: Location
    workflow: Location

    def __call__(self, blocks: Sequence[ExchangedBlock]) -> Iterator[pa.RecordBatch]:
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
        array = self.table.column(name).chunk(0)
        if pa.types.is_dictionary(array.type):
            return DictionaryColumn(array.dictionary, _indices(array))
        return DictionaryColumn(array)


def _indices(column: pa.DictionaryArray) -> npt.NDArray[np.int32]:
    indices: npt.NDArray[np.int32] = column.indices.to_numpy(zero_copy_only=False)
    return indices


def in_order(fitted: FittedWorkflow, tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of tables that `table_of` made, in the order of the dataset's."""
    hashes = np.concatenate([t.column(HASH).to_numpy() for t in tables])
    sources = [(_Sent(t), np.arange(t.num_rows, dtype=np.int32)) for t in tables]
    order = row_order(hashes, sources).rows
    stored = stored_schema(fitted.schema.features)
    columns = [
        gathered([DictionaryColumn(t.column(i).chunk(0)) for t in tables], order, field.type)
        for i, field in enumerate(stored)
    ]
    return pa.Table.from_arrays(columns, schema=stored)


_ALIGN = 64
#: Alignment of an array in a block, in bytes.
_BLOCK_ALIGN = 8


def save_arrays(path: Location, shared: Mapping[str, Array], by_part: Mapping[str, Array], edges: Array) -> None:
    """Write one-dimensional arrays of numbers under their names; a reader sees all of the file or none.

    Args:
        path: of the file.
        shared: arrays that every reader may need all of.
        by_part: arrays [rows], whose rows `edges[k]` to `edges[k + 1]` are part k's.
        edges: int64 [parts + 1].
    """
    mapped, offset = [], 0
    for name, array in shared.items():
        mapped.append([name, array.dtype.str, len(array), offset])
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    in_block = [[name, array.dtype.str] for name, array in by_part.items()]
    text = json.dumps({"whole": mapped, "bytes": offset, "by_part": in_block}).encode()
    # Binary, not JSON: there are as many edges as parts, and a reader of one part needs all.
    head = np.array([len(text), len(edges), *edges], np.int64).tobytes() + text
    with path.new_file() as partial, open(partial, "wb") as f:
        f.write(head + b"\0" * (-len(head) % _ALIGN))
        for array in shared.values():
            _write(f, np.ascontiguousarray(array), _ALIGN)
        contiguous = [np.ascontiguousarray(array) for array in by_part.values()]
        for start, end in pairwise(edges.tolist()):
            for array in contiguous:
                _write(f, array[start:end], _BLOCK_ALIGN)


def _write(file: BinaryIO, array: Array, align: int) -> None:
    file.write(array.data)
    file.write(b"\0" * (-array.nbytes % align))


def load_part(path: Location, part: int) -> dict[str, Array] | None:
    """Return what `save_arrays` wrote, read-only; of arrays by part the rows of this part. None: it has none."""
    data = np.memmap(path.local_path(), np.uint8, "r").view(np.ndarray)
    text, parts = data[:16].view(np.int64).tolist()
    begin = 16 + 8 * parts
    rows = np.diff(data[16:begin].view(np.int64)[: part + 2])
    if not rows[part]:
        return None
    head = json.loads(data[begin : begin + text].tobytes())
    start = -(-(begin + text) // _ALIGN) * _ALIGN
    out = {}
    for name, dtype, length, offset in head["whole"]:
        kind = np.dtype(dtype)
        out[name] = data[start + offset : start + offset + length * kind.itemsize].view(kind)
    kinds = [(name, np.dtype(dtype)) for name, dtype in head["by_part"]]
    sizes = sum((_padded(rows * kind.itemsize) for _, kind in kinds), np.zeros_like(rows))
    block = _read(path, start + head["bytes"] + int(sizes[:part].sum()), int(sizes[part]))
    offset, part_size = 0, int(rows[part])
    for name, kind in kinds:
        out[name] = np.frombuffer(block, kind, part_size, offset)
        offset += _padded(part_size * kind.itemsize)
    return out


def _padded(size: Any) -> Any:
    return -(-size // _BLOCK_ALIGN) * _BLOCK_ALIGN


def _read(path: Location, offset: int, size: int) -> bytes:
    fd = os.open(path.local_path(), os.O_RDONLY)
    try:
        # No read-ahead: the next block belongs to another task.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        data = os.pread(fd, size, offset)
        if len(data) != size:
            raise OSError(f"{path} ends before its part's {size} bytes from {offset} on")
        return data
    finally:
        os.close(fd)
