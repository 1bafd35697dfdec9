"""Data files of rows that Spark has made, and data files written anew without the rows that are not loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from headrace.lake.delta.data_files import SOURCE_FILE, SOURCE_LINE, DataFileWriter, WrittenFile
from headrace.lake.faults import BAD, GOOD
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Location

Mask = npt.NDArray[np.bool_]
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
    """Writes the good rows of one day, or its bad ones, that Spark has typed (headrace.lake.landing.judge)."""

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
        for field in self.schema:
            if field.name == SOURCE_LINE:
                column = table.column("_line")
            elif field.name in self.extra:
                column = _looked_up(table.column("_extra"), field.name)
            else:
                column = table.column(field.name)
            columns.append(column.cast(field.type) if column.type != field.type else column)
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
