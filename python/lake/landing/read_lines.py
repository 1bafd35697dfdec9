"""The fast way from landing files to data files: tasks that read blocks of lines by Arrow and write Parquet.

Lines that Arrow does not surely read as Spark's rules would are judged one by one (headrace.lake.landing.unsure_lines).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.delta.data_files import DataFileWriter
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.block_reader import Declaration, ReadBlock, Reader, TimeRange, event_micros, read_block
from headrace.lake.landing.blocks import TOO_LONG, LineBlock, Mask, Part, UnreadableError, blocks, count_lines
from headrace.lake.landing.delimited import DelimitedForm, DelimitedReader
from headrace.lake.landing.json_lines import JsonReader
from headrace.lake.landing.key_hashes import key_hashes, save_hashes
from headrace.lake.landing.unsure_lines import JudgedCounts, JudgedLines, LineJudge, judged_schema
from headrace.storage import Location

#: The columns of the lines that are left to Spark: numbers of the file and of the line, the line as it is, and why it
#: is no row, where that is known.
LEFT = pa.schema([("_file", pa.int32()), ("_line", pa.int64()), ("_text", pa.string()), ("_fault", pa.string())])


@dataclass(frozen=True)
class SourceFile:
    """One landing file."""

    ds: str
    name: str
    times: TimeRange
    #: None: JSON lines.
    form: DelimitedForm | None


@dataclass
class PartCounts:
    """Counts of the rows of a part; see `headrace.lake.landing.profile.FileProfile`."""

    file: int
    lines: int = 0
    skipped: int = 0
    good: int = 0
    #: Good ones that must not come back (headrace.lake.forgotten).
    forgotten: int = 0
    #: Lines for Spark's rules.
    left: int = 0
    #: Of the lines that Arrow is unsure of; those above are of the others.
    judged: JudgedCounts = field(default_factory=JudgedCounts)
    #: By declared column: values.
    readable: list[int] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    #: Microseconds since 1970.
    newest: int | None = None

    @staticmethod
    def of_result(result: dict[str, Any]) -> PartCounts:
        """Return the counts in a task's result."""
        return PartCounts(**result | {"judged": JudgedCounts(**result["judged"])})

    @property
    def counted(self) -> int:
        """The lines that any of the counts has."""
        judged = self.judged
        judged_lines = judged.skipped + judged.good + judged.bad + judged.forgotten
        return self.skipped + self.good + self.forgotten + self.left + judged_lines


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

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the result: `parts` (PartCounts), `data` (WrittenFile), `hashes`, `judged` and `left` (names in
        `folder`), or `unreadable`: why a file could not be read.
        """
        parts = self.tasks[number]
        output = _Output(self, self.files[parts[0].file].ds, [self.files[p.file].name for p in parts])
        try:
            counts = [self._read(part, k, output) for k, part in enumerate(parts)]
            yield {"parts": [asdict(c) for c in counts]} | output.close()
        except UnreadableError as e:
            output.abandon()
            yield {"unreadable": str(e)}
        except BaseException:
            output.abandon()
            raise

    def _read(self, part: Part, place: int, output: _Output) -> PartCounts:
        source = self.files[part.file]
        reader: Reader
        if source.form is None:
            reader = JsonReader(self.declaration, self.accept)
        else:
            reader = DelimitedReader(source.form, self.declaration)
        file = (part.file, source.ds, source.name)
        judge = LineJudge(self.declaration, source.form, self.accept, source.times, file, self.forgotten)
        counts, unsure = PartCounts(part.file, readable=[0] * len(self.declaration.columns)), 0
        for block in blocks(part, reader.block_size):
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
        if judged.undecided.any():
            counts.left += int(judged.undecided.sum())
            undecided = unsure.copy()
            undecided[unsure] = judged.undecided
            output.leave(judge.file[0], block, undecided)

    def _count(self, counts: PartCounts, block: LineBlock, read: ReadBlock) -> None:
        counts.lines += len(block)
        counts.skipped += read.skipped
        counts.good += len(read.lines)
        for i, column in enumerate(read.columns[: len(self.declaration.columns)]):
            counts.readable[i] += len(column) - column.null_count
        if self.declaration.event_time is not None and len(read.lines):
            time = read.columns[self.declaration.names.index(self.declaration.event_time)]
            newest = pc.max(event_micros(time)).as_py()
            counts.newest = max((n for n in (counts.newest, newest) if n is not None), default=None)


class _Output:
    """Files that a task writes."""

    def __init__(self, task: ReadTask, ds: str, names: list[str]) -> None:
        self._task = task
        self._schema = task.schema
        self._names = pa.array(names, pa.string())
        self._data = DataFileWriter(task.table, ds, self._schema, task.codec)
        self._left = _Scratch(task.folder / f"left-{uuid.uuid4()}.parquet", LEFT)
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

    def leave(self, file: int, block: LineBlock, unsure: Mask) -> None:
        """Put lines aside for Spark's rules."""
        numbers = block.number(unsure)
        files = pa.array(np.full(len(numbers), file, np.int32))
        faults = pa.array([TOO_LONG if block.too_long else None] * len(numbers), pa.string())
        table = pa.Table.from_arrays([files, pa.array(numbers), block.texts(unsure), faults], schema=LEFT)
        self._left.add(table)

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
        result["left"], result["judged"] = self._left.close(), self._judged.close()
        if self._hashes:
            result["hashes"] = save_hashes(self._task.folder, self._hashes, self._keyed)
        return result

    def abandon(self) -> None:
        """Leave nothing of its files."""
        self._data.abandon()
        self._left.abandon()
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
