"""Data files of a Delta table: their row groups, and writing them with what the log says of each."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, DataType, StructField, StructType, TimestampType

from headrace.storage import Location

#: A row group has at most so many rows, and about so many bytes in memory.
ROW_GROUP_ROWS = 1 << 18
ROW_GROUP_BYTES = 128 << 20
#: Rows by which it is judged whether a column's values repeat, and how many of them may differ.
_DICTIONARY_SAMPLE, _MOST_DISTINCT = 1 << 14, 0.6
#: As Delta's writer: columns with statistics, and characters of a text's minimum and maximum.
_STATISTICS_COLUMNS = 32
_STATISTICS_TEXT = 32
#: Spark's names of codecs where Arrow's are others.
_CODECS = {"uncompressed": "none", "lz4": "lz4", "lz4raw": "lz4", "lz4_raw": "lz4"}
#: A row's landing file and line.
SOURCE_FILE, SOURCE_LINE = "_source_file", "_source_line"
#: Codecs that pyarrow's writer names otherwise than its reader.
CODECS = {"uncompressed": "none"}


def data_schema(columns: str) -> pa.Schema:
    """The columns of a data file of the events' table: those of a Spark DDL string, and the row's landing line."""
    fields = [pa.field(f.name, _arrow_type(f.dataType)) for f in ddl_fields(columns)]
    return pa.schema([*fields, pa.field(SOURCE_FILE, pa.string()), pa.field(SOURCE_LINE, pa.int64())])


def ddl_fields(columns: str) -> list[StructField]:
    """The columns of a Spark DDL string."""
    found = StructType.fromDDL(columns)
    assert isinstance(found, StructType)
    return found.fields


def _arrow_type(type_: DataType) -> pa.DataType:
    if isinstance(type_, ArrayType):
        return pa.list_(pa.field("element", _arrow_type(type_.elementType)))
    if isinstance(type_, TimestampType):
        return pa.timestamp("us", tz="UTC")
    return to_arrow_type(type_)


@dataclass(frozen=True)
class WrittenFile:
    """A data file that no commit names yet. JSON values, but for its own type."""

    #: Relative to the table's folder.
    path: str
    ds: str
    #: Bytes.
    size: int
    rows: int
    #: Milliseconds since 1970.
    modified: int
    #: Delta's statistics, as JSON text.
    stats: str

    def add_action(self) -> dict[str, Any]:
        """The `add` action of Delta's log."""
        return {
            "path": self.path,
            "partitionValues": {"ds": self.ds},
            "size": self.size,
            "modificationTime": self.modified,
            "dataChange": True,
            "stats": self.stats,
        }


def remove_files(table: Location, files: Sequence[WrittenFile]) -> None:
    """Remove data files that no commit names."""
    for file in files:
        (table / file.path).remove_quietly()


def dictionary_columns(table: pa.Table) -> list[str]:
    """The columns (as Parquet names them) whose values repeat, judged by the first rows: a dictionary makes them small.

    Of others it is made for nothing: the writer gives it up once it is large, and has hashed each value until then.
    """
    found = []
    for field in table.schema:
        column, name = table.column(field.name), field.name
        sample = pa.concat_arrays(column.slice(0, _DICTIONARY_SAMPLE).chunks or [pa.nulls(0, field.type)])
        if pa.types.is_list(field.type):
            sample, name = sample.flatten(), f"{name}.list.element"
        if len(pc.unique(sample)) <= len(sample) * _MOST_DISTINCT:
            found.append(name)
    return found


def footer(file: Location) -> pq.FileMetaData:
    """What a Parquet file says of itself; of a store, the rest is not fetched."""
    with file.open() as stream:
        return pq.read_metadata(stream)


class DataFileWriter:
    """Writes one data file, row group by row group; none where there are no rows."""

    def __init__(self, table: Location, ds: str, schema: pa.Schema, codec: str) -> None:
        """`codec`: as Spark's `spark.sql.parquet.compression.codec` names it."""
        self._table, self._ds, self._schema = table, ds, schema
        self._codec = _CODECS.get(codec.lower(), codec.lower())
        name = f"part-{uuid.uuid4()}.c000.{self._codec}.parquet"
        self.path = table / f"ds={ds}" / name
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = self._written = 0
        self._nulls = dict.fromkeys(schema.names, 0)
        self._metadata: list[Any] = []
        self._writer: pq.ParquetWriter | None = None
        self._open: Any = None

    def add(self, rows: pa.Table) -> None:
        """Rows in the schema given."""
        if not rows.num_rows:
            return
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= ROW_GROUP_ROWS or self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> WrittenFile | None:
        """Finish the file. It is there under its name from now on, and not before."""
        self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        self._open.__exit__(None, None, None)
        self._writer = None
        self.path.start_writeback()
        info = self.path.info()
        stats = statistics(self._metadata[0], self._schema, self._nulls)
        return WrittenFile(
            f"ds={self._ds}/{self.path.name}", self._ds, info.size, self._written, info.modified_ns // 1_000_000, stats
        )

    def abandon(self) -> None:
        """Leave nothing of it."""
        if self._writer is not None:
            # On a full disk Arrow fails again, in other words: the first error is the one to hear of.
            with suppress(OSError, RuntimeError, pa.ArrowException):
                self._writer.close()
            with suppress(RuntimeError):
                self._open.__exit__(RuntimeError, RuntimeError("abandoned"), None)
            self._writer = None

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if self._writer is None:
            self.path.parent.make_dir()
            # Not waited for: the commit that names it has it on the disk before (headrace.lake.delta.transaction).
            self._open = self.path.transient().new_file()
            partial = self._open.__enter__()
            self._writer = pq.ParquetWriter(
                partial,
                self._schema,
                compression=self._codec,
                use_dictionary=dictionary_columns(table),
                store_schema=False,
                metadata_collector=self._metadata,
            )
        for name in self._schema.names:
            self._nulls[name] += table.column(name).null_count
        self._written += table.num_rows
        self._waiting, self._rows, self._bytes = [], 0, 0
        self._writer.write_table(table, row_group_size=table.num_rows)


def statistics(metadata: pq.FileMetaData, schema: pa.Schema, nulls: Mapping[str, int]) -> str:
    """Delta's statistics of a file: rows, smallest and largest values and nulls of its first columns."""
    names = schema.names[:_STATISTICS_COLUMNS]
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for k in range(metadata.num_columns):
        name = metadata.schema.column(k).path
        if name not in names:  # of a list: its elements have none
            continue
        found = [metadata.row_group(g).column(k).statistics for g in range(metadata.num_row_groups)]
        ranges = [(s.min, s.max) for s in found if s is not None and s.has_min_max]
        # A row group without a range has nulls alone, or values that have no order.
        if len(ranges) < sum(1 for s in found if s is None or s.num_values):
            continue
        if ranges:
            low, high = _lower(min(r[0] for r in ranges)), _upper(max(r[1] for r in ranges))
            if low is not None and high is not None:
                least[name], most[name] = low, high
    counts = {name: nulls[name] for name in names}
    whole = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": counts}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False)


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_STATISTICS_TEXT]
    return _spelled(value)


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= _STATISTICS_TEXT:
            return value
        # Above all that begin alike.
        return None if value[_STATISTICS_TEXT] == "\U0010ffff" else value[:_STATISTICS_TEXT] + "\U0010ffff"
    if isinstance(value, datetime) and value.microsecond % 1_000:
        value += timedelta(microseconds=1_000 - value.microsecond % 1_000)
    return _spelled(value)


def _spelled(value: Any) -> Any:
    """A value in Delta's statistics; None for one that has no place there."""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.") + f"{value.microsecond // 1_000:03d}Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, int | float) else None


def row_groups(parquet: pq.ParquetFile, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """One after the other; of some columns, or (None) of all."""
    for group in range(parquet.num_row_groups):
        yield parquet.read_row_group(group, columns=columns, use_threads=False)


def schema_of(parquet: pq.ParquetFile) -> pa.Schema:
    """As the file has it; times of 96 bits, which are Spark's instants, as those of 64."""
    schema = parquet.schema_arrow
    wide = {
        c.name for c in (parquet.schema.column(i) for i in range(len(parquet.schema))) if c.physical_type == "INT96"
    }
    for i, column in enumerate(schema):
        if column.name in wide:
            schema = schema.set(i, column.with_type(pa.timestamp("us", "UTC")))
    return schema
