"""The fast way from landing files to data files: tasks that read blocks of lines by Arrow and write Parquet.

Lines that Arrow does not surely read as Spark's rules would are put aside for them (`ReadLines.left`).
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
    """Counts of the rows of a part that Arrow read; see `headrace.lake.landing.profile.FileProfile`."""

    file: int
    lines: int = 0
    skipped: int = 0
    good: int = 0
    #: Good ones that must not come back (headrace.lake.forgotten).
    forgotten: int = 0
    left: int = 0
    #: By declared column: values.
    readable: list[int] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    #: Microseconds since 1970.
    newest: int | None = None


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
        """Yield the result: `parts` (PartCounts), `data` (WrittenFile), `hashes` and `left` (names in `folder`), or
        `unreadable`: why a file could not be read.
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
        counts = PartCounts(part.file, readable=[0] * len(self.declaration.columns))
        for block in blocks(part, reader.block_size):
            read = read_block(reader, block, self.declaration, source.times)
            if self.forgotten is not None and len(read.lines):
                forgotten_rows = self.forgotten.any_of(self.declaration.names, read.columns)
                counts.forgotten += int(forgotten_rows.sum())
                read = read.drop_rows(forgotten_rows)
            self._count(counts, block, read)
            output.add(read, place)
            if read.unsure.any():
                output.leave(part.file, block, read.unsure)
        rows = counts.good or counts.left
        counts.present = sorted(reader.seen.present) if counts.good or counts.forgotten else []
        counts.extra = sorted(reader.seen.extra) if rows else []
        return counts

    def _count(self, counts: PartCounts, block: LineBlock, read: ReadBlock) -> None:
        counts.lines += len(block)
        counts.skipped += read.skipped
        counts.good += len(read.lines)
        counts.left += int(read.unsure.sum())
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
        self._left: pq.ParquetWriter | None = None
        self._left_path = task.folder / f"left-{uuid.uuid4()}.parquet"
        self._left_file = ExitStack()
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
        if self._left is None:
            place = self._left_file.enter_context(self._left_path.new_file())
            self._left = pq.ParquetWriter(place, LEFT, store_schema=False)
        numbers = block.number(unsure)
        files = pa.array(np.full(len(numbers), file, np.int32))
        faults = pa.array([TOO_LONG if block.too_long else None] * len(numbers), pa.string())
        table = pa.Table.from_arrays([files, pa.array(numbers), block.texts(unsure), faults], schema=LEFT)
        self._left.write_table(table)

    def close(self) -> dict[str, Any]:
        """Finish all; JSON values."""
        result: dict[str, Any] = {"data": None, "left": None, "hashes": None}
        data = self._data.close()
        if data is not None:
            result["data"] = asdict(data)
        if self._left is not None:
            self._left.close()
            self._left_file.close()
            result["left"] = self._left_path.name
        if self._hashes:
            result["hashes"] = save_hashes(self._task.folder, self._hashes, self._keyed)
        return result

    def abandon(self) -> None:
        """Leave nothing of its files."""
        self._data.abandon()
        if self._left is not None:
            with suppress(OSError, RuntimeError, pa.ArrowException):
                self._left.close()
            self._left_file.__exit__(RuntimeError, RuntimeError("abandoned"), None)
