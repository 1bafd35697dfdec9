"""The Arrow engine's write: row groups of lake files to the parts of the dataset.

Tasks transform each row group (`TransformFiles`): which part of the dataset its rows belong to, what its distinct
values become (a code or a number each), and of each row, part by part, which of them it has. A task of each part
merges its rows of every row group in the order of the rows' hashes and writes them
(`headrace.features.arrow.write.PartWriter`). No row passes through the JVM, no text is transformed twice. One of two
transports brings the rows to their parts:

- A folder that all tasks see, with files of NumPy arrays. The arrays whose rows belong to parts lie in the file as
  blocks: all values of one part in one piece, which a reader of that part reads at once. Were each array in one
  piece, a part's few kilobytes of each would stand far from each other, and the kernel reads 128 KiB ahead for each:
  of files larger than the page cache, forty times what is needed. The other arrays are mapped into memory.
- Spark's shuffle, with Arrow tables, where hosts share no folder. So no task opens a file of another host, and Spark
  computes again what a lost executor held.

The files of the dataset are the same, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.config.schema import Feature
from headrace.features.arrow.decode import (
    FILE,
    HASH,
    LINE,
    HostFolder,
    LakeFile,
    LakeRowGroup,
    RowGroupLayout,
    of_run_here,
    row_groups,
)
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.arrow.scan import FileTasks, LakeRows, Splitter
from headrace.features.arrow.transform import EDGES, HASHES, PartRows, Values, by_part, placed, transformed
from headrace.features.arrow.write import PartWriter, written_dataset
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
        rows: the lake files, scanned (`LakeRows.scan`).
        plans: from `plan_files`, in which every split of `rows` has a part.
        folder: the dataset's (partial) folder, which all tasks see.
        workflow: `fitted`, saved: where tasks load it from.
        spark: schedules the tasks; None: they run in this process.
    """
    for split in {p.split for p in plans}:
        (folder / split).make_dir()
    run_folder = rows.folder if isinstance(rows.folder, HostFolder) else rows.scratch
    files = TransformFiles(
        rows.tasks(spark), rows.folder, rows.layout, rows.splitter, workflow, run_folder, tuple(plans)
    )
    writer = PartWriter(tuple(plans), folder, workflow)
    if isinstance(rows.folder, HostFolder):
        assert spark is not None
        parts = _through_shuffle(files, writer, rows, spark)
    else:
        parts = _through_folder(files, writer, rows, spark)
    return written_dataset(plans, parts)


@dataclass(frozen=True)
class TransformFiles:
    """Transform the rows of a task's files. Runs in a task, before either transport."""

    tasks: FileTasks
    #: Folder of the row groups.
    folder: Location | HostFolder
    layout: RowGroupLayout
    splitter: Splitter
    workflow: Location
    #: Folder of this run alone, for what the workers of a host map.
    run_folder: Location | HostFolder
    plans: tuple[FilePlan, ...]

    def fitted(self) -> FittedWorkflow:
        """Return the workflow, whose large vocabularies and keyed tables all workers of the host map."""
        return mapped(self.workflow, of_run_here(self.run_folder) / "maps")

    def row_groups(self, fitted: FittedWorkflow, file: LakeFile) -> Iterator[tuple[LakeRowGroup, dict[str, Array]]]:
        """Yield the row groups of a file that have rows of a part, with the arrays of `transformed`."""
        for row_group in row_groups(file, self.folder, self.layout)[0]:
            arrays = transformed(fitted, row_group, self.splitter, self.plans)
            if arrays is not None:
                yield row_group, arrays


@lru_cache(maxsize=2)
def mapped(workflow: Location, maps: Location) -> FittedWorkflow:
    """Return the workflow to transform with.

    Args:
        workflow: where it is saved.
        maps: folder of the mapped files, of this workflow alone, on this host or where all hosts see it; filled by the
            first worker.
    """
    return FittedWorkflow.load(workflow, maps=maps)


def _through_folder(
    files: TransformFiles, writer: PartWriter, rows: LakeRows, spark: SparkSession | None
) -> list[dict[str, Any]]:
    """Write the parts; their rows pass through files in the run's folder, which all tasks see."""
    assert isinstance(rows.folder, Location)
    saved = sorted(run_tasks(spark, len(files.tasks), SaveRows(files, rows.scratch)), key=lambda f: f["file"])
    outputs = tuple(
        (rows.folder / row_group, rows.scratch / arrays) for f in saved for row_group, arrays in f["row_groups"]
    )
    parts = run_tasks(spark, len(writer.plans), WriteSaved(outputs, writer))
    for _, arrays in outputs:  # so that syncing the dataset does not write them to the disk
        arrays.remove_quietly()
    return parts


@dataclass(frozen=True)
class SaveRows:
    """Transform the rows of a task's files and save them by part. Runs in a task."""

    files: TransformFiles
    scratch: Location

    def __call__(self, task: int) -> Iterator[dict[str, Any]]:
        assert isinstance(self.files.folder, Location)
        fitted = self.files.fitted()
        for number, file in self.files.tasks[task]:
            saved = list[tuple[str, str]]()
            for row_group, arrays in self.files.row_groups(fitted, file):
                path = self.scratch / f"outputs-{number}-{len(saved)}.arrays"
                cut = by_part(arrays, fitted.workflow.label_column)
                save_arrays(path, {n: a for n, a in arrays.items() if n not in cut}, cut, arrays[EDGES])
                saved.append((row_group.path.below(self.files.folder), path.name))
            yield {"file": number, "row_groups": saved}


@dataclass(frozen=True)
class WriteSaved:
    """Write a part from the files that `SaveRows` left. Runs in a task."""

    #: Paths of row groups and of the arrays of `SaveRows` for them.
    outputs: tuple[tuple[Location, Location], ...]
    writer: PartWriter

    def __call__(self, part: int) -> Iterator[dict[str, Any]]:
        sources = []
        for row_group, path in self.outputs:
            arrays = load_part(path, part)
            if arrays is not None:
                sources.append(PartRows(LakeRowGroup(row_group), part, 0, len(arrays[HASHES]), arrays))
        sets = len(source_sets(self.writer.fitted()))
        missing = sum((s.missing(sets) for s in sources), np.zeros(sets, np.int64))
        yield self.writer.write(part, sources, missing)


#: In place of a table's number: counts of rows that lack a value, by `source_sets`.
_MISSING, _ROWS = 0, 1


def _through_shuffle(
    files: TransformFiles, writer: PartWriter, rows: LakeRows, spark: SparkSession
) -> list[dict[str, Any]]:
    """Write the parts; their rows pass through Spark's shuffle."""
    receive = WriteReceived(writer)
    with small_batches(spark):
        parts = exchange(
            spark,
            len(files.tasks),
            SendRows(files),
            len(writer.plans),
            receive,
            "written string",
            rows.hosts_of(files.tasks),
        )
        return [json.loads(text) for (text,) in parts.collect()]


@dataclass(frozen=True)
class SendRows:
    """Transform the rows of a task's files and send them to their parts. Runs in a task."""

    files: TransformFiles

    def __call__(self, task: int) -> Iterator[ExchangedBlock]:
        fitted = self.files.fitted()
        sets = len(source_sets(fitted))
        for number, file in self.files.tasks[task]:
            sender = Sender(number)
            for row_group, arrays in self.files.row_groups(fitted, file):
                for part, (start, end) in enumerate(pairwise(arrays[EDGES].tolist())):
                    if start == end:
                        continue
                    part_rows = PartRows(row_group, part, start, end, arrays)
                    yield from sender.add(part, _MISSING, pa.table({"missing": part_rows.missing(sets)}))
                    for piece in part_rows.pieces(fitted.workflow.carried_columns):
                        yield from sender.add(part, _ROWS, table_of(fitted, piece))
            yield from sender.rest()


#: Prefixes of the columns of `table_of`: a feature may have the name of the label or of a column of the lake.
_FEATURE, _COLUMN, _LABEL = "feature.", "column.", "label"


def table_of(fitted: FittedWorkflow, rows: PartRows) -> pa.Table:
    """Return rows as they are stored, with what they are ordered by: their hash, file and line."""
    everything = np.arange(len(rows.rows), dtype=np.int32)
    columns: dict[str, pa.Array] = {}
    for feature in fitted.features:
        is_list = feature.is_list
        array = rows.output_lists(feature) if is_list else placed([rows.output(feature)], [everything])
        columns[_FEATURE + feature.name] = array
    columns[_LABEL] = placed([rows.label(fitted.workflow.label_column)], [everything])
    carried = fitted.workflow.carried_columns
    stored_types = stored_schema(fitted.schema.features).types[len(columns) :]
    for name, stored_type in zip(carried, stored_types, strict=True):
        columns[_COLUMN + name] = rows.column(name).decode().cast(stored_type)
    columns[HASH] = pa.array(rows.hashes)
    columns[FILE] = rows.column(FILE).decode().cast(pa.string()).dictionary_encode()
    columns[LINE] = rows.column(LINE).decode()
    return pa.table(columns)


@dataclass(frozen=True)
class ShuffledRows:
    """Rows of a part that came as a `table_of`, of one chunk a column."""

    table: pa.Table

    @property
    def hashes(self) -> npt.NDArray[np.int64]:
        """See `PartSource`."""
        hashes: npt.NDArray[np.int64] = self._array(HASH).to_numpy()
        return hashes

    def output(self, feature: Feature) -> Values:
        """See `PartSource`."""
        return Values(self._array(_FEATURE + feature.name).to_numpy(), None)

    def output_lists(self, feature: Feature) -> pa.ListArray:
        """See `PartSource`."""
        return self._array(_FEATURE + feature.name)

    def label(self, name: str) -> Values:
        """See `PartSource`."""
        return Values(self._array(_LABEL).to_numpy(), None)

    def column(self, name: str) -> DictionaryColumn:
        """See `PartSource`: FILE, LINE or a carried column, as it is stored."""
        array = self._array(name if name in (FILE, LINE) else _COLUMN + name)
        if pa.types.is_dictionary(array.type):
            return DictionaryColumn(array.dictionary, array.indices.to_numpy(zero_copy_only=False))
        return DictionaryColumn(array)

    def _array(self, name: str) -> pa.Array:
        return self.table.column(name).chunk(0)


@dataclass(frozen=True)
class WriteReceived:
    """Write a part from the blocks that `SendRows` sent. Runs in a task."""

    writer: PartWriter

    def __call__(self, blocks: Sequence[ExchangedBlock]) -> Iterator[pa.RecordBatch]:
        missing, sources = np.zeros(len(source_sets(self.writer.fitted())), np.int64), list[ShuffledRows]()
        for block in blocks:
            for name, table in unpacked(block.payload):
                if name == _MISSING:
                    missing += table.column(0).to_numpy()
                else:
                    sources.append(ShuffledRows(table.combine_chunks()))
        written = self.writer.write(blocks[0].partition, sources, missing)
        yield pa.RecordBatch.from_pydict({"written": [json.dumps(written)]})


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
