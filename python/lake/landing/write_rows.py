"""Tasks that write data files: of landing lines that Arrow reads, of judged rows, and anew without some of their rows.

Arrow reads blocks of lines. Lines that it is unsure of are judged one by one
(headrace.lake.landing.unsure_lines).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from headrace.lake.delta.data_files import SOURCE_FILE, SOURCE_LINE, DataFileWriter, WrittenFile
from headrace.lake.faults import BAD, GOOD
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.blocks import (
    Declaration,
    LineBlock,
    Mask,
    Parsed,
    Part,
    ReadBlock,
    Reader,
    SeenColumns,
    TimeRange,
    UnreadableError,
    blocks,
    count_lines,
    event_micros,
    read_block,
)
from headrace.lake.landing.delimited import DelimitedForm, DelimitedReader, LineForm, QuotedFields, record_blocks
from headrace.lake.landing.json_lines import JsonReader
from headrace.lake.landing.repeats import key_hashes, save_hashes
from headrace.lake.landing.unsure_lines import JudgedCounts, JudgedLines, LineJudge, judged_schema, later
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Location

#: Bytes of lines that are judged at once.
_JUDGED_BLOCK = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One landing file."""

    ds: str
    name: str
    times: TimeRange
    #: None: JSON lines.
    form: LineForm | None

    @property
    def over_lines(self) -> QuotedFields | None:
        """The fields of records that may go over several lines; None where each line is a record."""
        form = self.form
        return form.fields if isinstance(form, DelimitedForm) and form.multiline else None


@dataclass
class PartCounts:
    """Counts of the rows of a part; see `headrace.lake.landing.expectations.FileProfile`."""

    file: int
    lines: int = 0
    skipped: int = 0
    good: int = 0
    #: Good ones that must not come back (headrace.lake.forgotten).
    forgotten: int = 0
    #: Of the lines that Arrow is unsure of; those above are of the others.
    judged: JudgedCounts = field(default_factory=JudgedCounts)
    #: By declared column: values.
    readable: list[int] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    #: Microseconds since 1970.
    newest: int | None = None
    watermark: int | None = None

    @staticmethod
    def of_result(result: dict[str, Any]) -> PartCounts:
        """Return the counts in a task's result."""
        return PartCounts(**result | {"judged": JudgedCounts(**result["judged"])})

    @property
    def counted(self) -> int:
        """The lines that any of the counts has."""
        judged = self.judged
        judged_lines = judged.skipped + judged.good + judged.bad + judged.forgotten - judged.expanded
        return self.skipped + self.good + self.forgotten + judged_lines


@dataclass(frozen=True)
class CountTask:
    """Counts the lines that begin in a part."""

    parts: tuple[Part, ...]

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        yield {"part": number, "lines": count_lines(self.parts[number])}


@dataclass(frozen=True)
class ReadTask:
    """Reads parts of one day's files, writes their good rows as one data file."""

    tasks: tuple[tuple[Part, ...], ...]
    files: Mapping[int, SourceFile]
    declaration: Declaration
    #: Whether undeclared columns become columns of the table.
    accept: bool
    keys: tuple[str, ...]
    table: Location
    #: Of the data files.
    schema: pa.Schema
    #: Of the load, for what others read of it.
    folder: Location
    codec: str
    #: Values whose rows must not come back, of declared columns.
    forgotten: ForgottenValues | None = None
    #: Whether all rows are judged one by one, good ones too.
    judges_all: bool = False

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the result: `parts` (PartCounts), `data` (WrittenFile), `hashes` and `judged` (names in `folder`), or
        `unreadable`: the number of a file that could not be read, why, and whether its content is at fault.
        """
        parts = self.tasks[number]
        output = _Output(self, self.files[parts[0].file].ds, [self.files[p.file].name for p in parts])
        try:
            counts = []
            for place, part in enumerate(parts):
                try:
                    counts.append(self._read(part, place, output))
                except UnreadableError as e:
                    output.abandon()
                    yield {"unreadable": [part.file, str(e), e.is_of_content]}
                    return
            yield {"parts": [asdict(c) for c in counts]} | output.close()
        except BaseException:
            output.abandon()
            raise

    def _read(self, part: Part, place: int, output: _Output) -> PartCounts:
        source = self.files[part.file]
        reader = _NoReader() if self.judges_all else reader_of_lines(source.form, self.declaration, self.accept)
        file = (part.file, source.ds, source.name)
        judge = LineJudge(self.declaration, source.form, self.accept, source.times, file, self.forgotten)
        counts, unsure = PartCounts(part.file, readable=[0] * len(self.declaration.columns)), 0
        fields = source.over_lines
        for block in blocks(part, reader.block_size) if fields is None else record_blocks(part, fields):
            read = read_block(reader, block, self.declaration, source.times)
            if self.forgotten is not None and len(read.lines):
                forgotten_rows = self.forgotten.any_of(self.declaration.names, read.columns)
                counts.forgotten += int(forgotten_rows.sum())
                read = read.drop_rows(forgotten_rows)
            self._count(counts, block, read)
            output.add(read, place)
            if read.unsure.any():
                unsure += int(read.unsure.sum())
                self._judge(judge, block, read.unsure, counts, output)
        rows = counts.good or unsure
        counts.present = sorted(reader.seen.present) if counts.good or counts.forgotten else []
        counts.extra = sorted(reader.seen.extra) if rows else []
        return counts

    def _judge(self, judge: LineJudge, block: LineBlock, unsure: Mask, counts: PartCounts, output: _Output) -> None:
        judged = judge.judge(block, unsure)
        counts.judged.add(judged.counts)
        output.add_judged(judged)

    def _count(self, counts: PartCounts, block: LineBlock, read: ReadBlock) -> None:
        counts.lines += len(block)
        counts.skipped += read.skipped
        counts.good += len(read.lines)
        for i, column in enumerate(read.columns[: len(self.declaration.columns)]):
            counts.readable[i] += len(column) - column.null_count
        if len(read.lines):
            counts.newest = later(counts.newest, self._latest(read, self.declaration.event_time))
            counts.watermark = later(counts.watermark, self._latest(read, self.declaration.watermark))

    def _latest(self, read: ReadBlock, column: str | None) -> int | None:
        """Return the greatest value of a column of times, in microseconds since 1970."""
        if column is None:
            return None
        time = read.columns[self.declaration.names.index(column)]
        latest: int | None = pc.max(event_micros(time, self.declaration.timezone)).as_py()
        return latest


class _NoReader:
    """Reads no line: all are judged one by one."""

    block_size = _JUDGED_BLOCK

    def __init__(self) -> None:
        self.seen = SeenColumns()

    def odd(self, block: LineBlock) -> Mask:
        return np.ones(len(block), np.bool_)

    def skipped(self, block: LineBlock) -> Mask:
        return np.zeros(len(block), np.bool_)

    def parse(self, lines: pa.BinaryArray) -> Parsed:
        raise AssertionError("all lines are judged one by one")


def reader_of_lines(form: LineForm | None, declaration: Declaration, accept: bool) -> Reader:
    """Return the fastest reader of a file's lines. `accept`: undeclared columns become columns of the table."""
    keys = [str(c.steps[0]) for c in declaration.columns]
    has_paths = any(len(c.steps) > 1 for c in declaration.columns)
    if has_paths or len({*keys, *declaration.extra}) < len(keys) + len(declaration.extra):
        return _NoReader()
    if form is None:
        return JsonReader(declaration, accept)
    if isinstance(form, DelimitedForm) and form.fields.is_for_arrow:
        return DelimitedReader(form, declaration)
    return _NoReader()


class _Output:
    """Files that a task writes."""

    def __init__(self, task: ReadTask, ds: str, names: list[str]) -> None:
        self._task = task
        self._schema = task.schema
        self._names = pa.array(names, pa.string())
        self._data = DataFileWriter(task.table, ds, self._schema, task.codec)
        self._judged = _Scratch(task.folder / f"judged-{uuid.uuid4()}.parquet", judged_schema(task.declaration))
        self._hashes: list[npt.NDArray[np.int64]] = []
        self._keyed: list[Mask] = []

    def add(self, read: ReadBlock, place: int) -> None:
        """Write good rows; `place`: of their file's name."""
        if not len(read.lines):
            return
        rows = pa.Table.from_arrays(
            [*read.columns, self._names.take(pa.array(np.full(len(read.lines), place))), pa.array(read.lines)],
            schema=self._schema,
        )
        if self._task.keys:
            hashes, keyed = key_hashes([rows.column(k) for k in self._task.keys])
            self._hashes.append(hashes)
            self._keyed.append(keyed)
        self._data.add(rows)

    def add_judged(self, judged: JudgedLines) -> None:
        """Keep judged rows for what comes after all files are read."""
        if judged.rows.num_rows:
            self._judged.add(judged.rows)

    def close(self) -> dict[str, Any]:
        """Finish all; JSON values."""
        result: dict[str, Any] = {"data": None, "hashes": None}
        data = self._data.close()
        if data is not None:
            result["data"] = asdict(data)
        result["judged"] = self._judged.close()
        if self._hashes:
            result["hashes"] = save_hashes(self._task.folder, self._hashes, self._keyed)
        return result

    def abandon(self) -> None:
        """Leave nothing of its files."""
        self._data.abandon()
        self._judged.abandon()


class _Scratch:
    """A Parquet file of a load's folder that is made when it gets its first rows."""

    def __init__(self, path: Location, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._writer: pq.ParquetWriter | None = None
        self._file = ExitStack()

    def add(self, table: pa.Table) -> None:
        """Write rows."""
        if self._writer is None:
            place = self._file.enter_context(self._path.new_file())
            self._writer = pq.ParquetWriter(place, self._schema, store_schema=False)
        self._writer.write_table(table)

    def close(self) -> str | None:
        """Finish the file; return its name, None where there were no rows."""
        if self._writer is None:
            return None
        self._writer.close()
        self._file.close()
        return self._path.name

    def abandon(self) -> None:
        """Leave nothing of the file."""
        if self._writer is not None:
            with suppress(OSError, RuntimeError, pa.ArrowException):
                self._writer.close()
            self._file.__exit__(RuntimeError, RuntimeError("abandoned"), None)


_CODEC = "spark.sql.parquet.compression.codec"
#: Rows of a line are numbered below 2^this.
_COPY_BITS = 20
#: The columns of the quarantine table's data files.
QUARANTINE = pa.schema(
    [(SOURCE_FILE, pa.string()), (SOURCE_LINE, pa.int64()), ("_raw", pa.string()), ("_reason", pa.string())]
)


@dataclass(frozen=True)
class Dropped:
    """Places of rows that are not loaded, in a file of a load's folder."""

    path: Location | None

    @staticmethod
    def save(rows: pa.Table, path: Location) -> Dropped:
        """Save the places of `rows`: `_file`, `_line`, `_copy`."""
        if not rows.num_rows:
            return Dropped(None)
        files, lines, copies = (rows.column(n).to_numpy().astype(np.int64) for n in ("_file", "_line", "_copy"))
        order = np.argsort(files, kind="stable")
        with path.new_file() as place, open(place, "wb") as file:
            np.savez(file, files=files[order], places=(lines << _COPY_BITS | copies)[order])
        return Dropped(path)

    def load(self) -> Mapping[int, npt.NDArray[np.int64]]:
        """Return the places, by file."""
        if self.path is None:
            return {}
        with np.load(self.path.local_path()) as saved:
            files, places = saved["files"], saved["places"]
        numbers, starts = np.unique(files, return_index=True)
        return dict(zip(numbers.tolist(), np.split(places, starts[1:]), strict=True))


def rows_to_keep(
    dropped: Mapping[int, npt.NDArray[np.int64]],
    files: npt.NDArray[np.int64],
    lines: npt.NDArray[np.int64],
    copies: npt.NDArray[np.int64] | int = 0,
) -> Mask:
    """Return a mask that is True for rows to keep. bool [rows]."""
    keep = np.ones(len(files), np.bool_)
    for number in np.unique(files).tolist():
        if number in dropped:
            is_of_file = files == number
            keep &= ~(is_of_file & np.isin(lines << _COPY_BITS | copies, dropped[number]))
    return keep


@dataclass(frozen=True)
class RewriteTask:
    """Writes data files again without some rows, and removes the old ones."""

    files: tuple[WrittenFile, ...]
    numbers: Mapping[tuple[str, str], int]
    dropped: Dropped
    table: Location
    schema: pa.Schema
    codec: str

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        old = self.files[number]
        writer = DataFileWriter(self.table, old.ds, self.schema, self.codec)
        dropped = self.dropped.load()
        path = self.table / old.path
        try:
            parquet = pq.ParquetFile(path.local_path(), memory_map=True)
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group, use_threads=False)
                names = table.column(SOURCE_FILE).combine_chunks().dictionary_encode()
                if isinstance(names, pa.ChunkedArray):
                    names = names.chunk(0)
                file_numbers = np.array([self.numbers[old.ds, name] for name in names.dictionary.to_pylist()], np.int64)
                keep = rows_to_keep(
                    dropped, file_numbers[names.indices.to_numpy()], table.column(SOURCE_LINE).to_numpy()
                )
                writer.add(table if keep.all() else table.filter(pa.array(keep)))
            written = writer.close()
        except BaseException:
            writer.abandon()
            raise
        yield {"old": number, "new": asdict(written) if written is not None else None}


@dataclass(frozen=True)
class TypedRowsTask:
    """Writes the good rows of one day, or its bad ones, that were judged one by one."""

    #: (day, Parquet file of typed rows).
    work: tuple[tuple[str, Location], ...]
    dropped: Dropped
    table: Location
    schema: pa.Schema
    #: Undeclared columns that the table has or gets.
    extra: Sequence[str]
    codec: str
    bad: bool = False

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        ds, path = self.work[number]
        writer = DataFileWriter(self.table, ds, self.schema, self.codec)
        dropped = self.dropped.load()
        try:
            parquet = pq.ParquetFile(path.local_path(), coerce_int96_timestamp_unit="us")
            for group in range(parquet.num_row_groups):
                writer.add(self._rows(parquet.read_row_group(group, use_threads=False), ds, dropped))
            written = writer.close()
        except BaseException:
            writer.abandon()
            raise
        if written is not None:
            yield asdict(written)

    def _rows(self, table: pa.Table, ds: str, dropped: Mapping[int, npt.NDArray[np.int64]]) -> pa.Table:
        state = BAD if self.bad else GOOD
        table = table.filter(pc.and_(pc.equal(table.column("_state"), state), pc.equal(table.column("_ds"), ds)))
        if dropped and table.num_rows:
            files, lines, copies = (table.column(n).to_numpy().astype(np.int64) for n in ("_file", "_line", "_copy"))
            keep = rows_to_keep(dropped, files, lines, copies)
            if not keep.all():
                table = table.filter(pa.array(keep))
        columns = []
        for target in self.schema:
            if target.name == SOURCE_LINE:
                column = table.column("_line")
            elif target.name in self.extra:
                column = _looked_up(table.column("_extra"), target.name)
            else:
                column = table.column(target.name)
            columns.append(column.cast(target.type) if column.type != target.type else column)
        return pa.Table.from_arrays(columns, schema=self.schema)


@dataclass(frozen=True)
class FrameRowsTask:
    """Writes the rows of Parquet files of Spark's that have the schema's columns, as they are."""

    #: (day of all rows, Parquet file).
    work: tuple[tuple[str, Location], ...]
    table: Location
    schema: pa.Schema
    codec: str

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        ds, path = self.work[number]
        writer = DataFileWriter(self.table, ds, self.schema, self.codec)
        try:
            parquet = pq.ParquetFile(path.local_path())
            for group in range(parquet.num_row_groups):
                rows = parquet.read_row_group(group, columns=self.schema.names, use_threads=False)
                writer.add(rows.select(self.schema.names).cast(self.schema))
            written = writer.close()
        except BaseException:
            writer.abandon()
            raise
        if written is not None:
            yield asdict(written)


def frame_files(frame: DataFrame, table: Location, schema: pa.Schema, folder: Location) -> list[WrittenFile]:
    """Write data files of a frame's rows, which no commit names yet.

    Args:
        frame: the schema's columns and `ds`.
        table: the Delta table's folder.
        schema: of the data files.
        folder: is not there; seen by all executors.
    """
    frame.write.partitionBy("ds").parquet(folder.spark_path)
    days = [f for f in folder.entries() if f.name.startswith("ds=")]
    work = tuple((day.name[3:], path) for day in days for path in day.entries() if path.suffix == ".parquet")
    task = FrameRowsTask(work, table, schema, codec_of(frame.sparkSession))
    return [WrittenFile(**f) for f in run_tasks(frame.sparkSession if len(work) > 1 else None, len(work), task)]


def codec_of(spark: SparkSession) -> str:
    """Return the compression of data files, as Spark's own writers have it."""
    return str(spark.conf.get(_CODEC, "snappy"))


def _looked_up(maps: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    chunks = [pc.map_lookup(chunk, name, "first") for chunk in maps.chunks]
    return pa.chunked_array(chunks, pa.string())
