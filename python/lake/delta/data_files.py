"""Data files of a Delta table: their row groups, and writing them with what the log says of each."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute import pc
from headrace.lake.delta.log import file_path
from headrace.storage import Location

# Late: checks of tables whose columns nobody declares anew do without pyspark.
if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField

#: Most rows of a row group, and about its most bytes in memory.
ROW_GROUP_ROWS = 1 << 18
ROW_GROUP_BYTES = 128 << 20
#: Rows sampled to decide whether a column is dictionary-encoded, and the largest share of distinct ones.
_DICTIONARY_SAMPLE, _MOST_DISTINCT = 1 << 14, 0.6
#: As in Delta's writer: number of columns with statistics, and characters of a text's minimum and maximum.
_STATISTICS_COLUMNS = 32
_STATISTICS_TEXT = 32
#: Spark's names of codecs -> Arrow's, where they differ.
_SPARK_CODECS = {"uncompressed": "none", "lz4": "lz4", "lz4raw": "lz4", "lz4_raw": "lz4"}
#: A row's landing file and line.
SOURCE_FILE, SOURCE_LINE = "_source_file", "_source_line"
#: Names of codecs in pyarrow's reader -> in its writer, where they differ.
_PARQUET_CODECS = {"uncompressed": "none"}


def data_schema(columns: str) -> pa.Schema:
    """Return the columns of a data file of an events table: those of a Spark DDL string, and the row's landing line."""
    fields = [pa.field(f.name, _arrow_type(f.dataType)) for f in ddl_fields(columns)]
    return pa.schema([*fields, pa.field(SOURCE_FILE, pa.string()), pa.field(SOURCE_LINE, pa.int64())])


def ddl_fields(columns: str) -> list[StructField]:
    """Return the columns of a Spark DDL string."""
    from pyspark.sql.types import StructType

    struct = StructType.fromDDL(columns)
    assert isinstance(struct, StructType)
    return struct.fields


def _arrow_type(type_: DataType) -> pa.DataType:
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import ArrayType, TimestampType

    if isinstance(type_, ArrayType):
        return pa.list_(pa.field("element", _arrow_type(type_.elementType)))
    if isinstance(type_, TimestampType):
        return pa.timestamp("us", tz="UTC")
    return to_arrow_type(type_)


@dataclass(frozen=True)
class WrittenFile:
    """A data file of a day that no commit names yet, in JSON values but for its own type."""

    #: The `add` action for Delta's log.
    add: dict[str, Any]
    rows: int

    @property
    def path(self) -> str:
        """Return the path relative to the table's folder."""
        return str(self.add["path"])

    @property
    def ds(self) -> str:
        """Return the day that is the file's partition."""
        return str(self.add["partitionValues"]["ds"])

    @property
    def size(self) -> int:
        """Return the file's bytes."""
        return int(self.add["size"])

    @property
    def stats(self) -> str:
        """Return Delta's statistics of the file, as JSON text."""
        return str(self.add["stats"])

    def add_action(self) -> dict[str, Any]:
        """Return the `add` action of Delta's log."""
        return self.add


def remove_files(table: Location, files: Sequence[WrittenFile]) -> None:
    """Remove data files that no commit names."""
    for file in files:
        (table / file.path).remove_quietly()


def dictionary_columns(table: pa.Table) -> list[str]:
    """Return the columns (as Parquet names them) whose values repeat, judged by the first rows: a dictionary makes them
    small.

    Of others it is made for nothing: the writer gives it up once it is large, and has hashed each value until then.
    """
    repeating = []
    for field in table.schema:
        column, name = table.column(field.name), field.name
        sample = pa.concat_arrays(column.slice(0, _DICTIONARY_SAMPLE).chunks or [pa.nulls(0, field.type)])
        if pa.types.is_list(field.type):
            sample, name = sample.flatten(), f"{name}.list.element"
        if len(pc.unique(sample)) <= len(sample) * _MOST_DISTINCT:
            repeating.append(name)
    return repeating


def footer(file: Location) -> pq.FileMetaData:
    """Return the footer of a Parquet file; of a store, the rest is not fetched."""
    with file.open() as stream:
        return pq.read_metadata(stream)


class RowGroupWriter:
    """Writes one data file of a table, a row group at a time, and gives the action that adds it to the log.

    The file is there under its name when the block has ended well; an error leaves nothing of it.
    """

    def __init__(
        self,
        table: Location,
        folder: str,
        schema: pa.Schema,
        codec: str,
        *,
        use_dictionary: bool | list[str] = True,
        store_schema: bool = True,
        is_durable: bool = True,
    ) -> None:
        """Begin a file of a new name.

        Args:
            table: its folder.
            folder: of the file, as paths in the log have it; empty: the table's own.
            schema: of the file.
            codec: as Parquet's footers name it, in lower case.
            use_dictionary: whether columns have dictionaries, or the ones that have.
            store_schema: whether the file keeps the Arrow schema besides Parquet's.
            is_durable: whether the file is on the disk once it is closed. A commit waits for all files that it adds
                (headrace.lake.delta.transaction); others that name files must not outlive them.
        """
        name = f"part-{uuid.uuid4()}.c000.{codec}.parquet"
        self.path = f"{folder}/{name}" if folder else name
        self.file = file_path(table, self.path)
        #: Rows that were written.
        self.rows, self._nulls = 0, dict.fromkeys(schema.names, 0)
        self._schema, self._metadata = schema, list[pq.FileMetaData]()
        with ExitStack() as opened:
            path = opened.enter_context((self.file if is_durable else self.file.transient()).new_file())
            self._writer = pq.ParquetWriter(
                path,
                schema,
                compression=_PARQUET_CODECS.get(codec, codec),
                use_dictionary=use_dictionary,
                store_schema=store_schema,
                metadata_collector=self._metadata,
            )
            self._partial = opened.pop_all()

    def write(self, rows: pa.Table, group_rows: int | None = None) -> None:
        """Write rows in the schema given: as one row group, or as groups of at most `group_rows`."""
        for name in self._nulls:
            self._nulls[name] += rows.column(name).null_count
        self.rows += rows.num_rows
        self._writer.write_table(rows, row_group_size=group_rows or max(1, rows.num_rows))

    def add_action(self, partition: Mapping[str, str | None], data_change: bool = True) -> dict[str, Any]:
        """Return the `add` action of the finished file.

        Args:
            partition: values of the partition columns, as text.
            data_change: whether rows come by it, rather than from files that go.
        """
        info = self.file.info()
        return {
            "path": self.path,
            "partitionValues": dict(partition),
            "size": info.size,
            "modificationTime": info.modified_ns // 1_000_000,
            "dataChange": data_change,
            "stats": statistics(self._metadata[0], self._schema, self._nulls),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None:
            # On a full disk Arrow fails again here, with another message: the first error is the one to report.
            with suppress(OSError, RuntimeError, pa.ArrowException):
                self._writer.close()
            return self._partial.__exit__(kind, error, trace)
        with self._partial:
            self._writer.close()
        return None


class DataFileWriter:
    """Writes the rows of one day, collected into large row groups; no file where there are no rows."""

    def __init__(self, table: Location, ds: str, schema: pa.Schema, codec: str) -> None:
        """`codec`: as Spark's `spark.sql.parquet.compression.codec` names it."""
        self._table, self._ds, self._schema = table, ds, schema
        self._codec = _SPARK_CODECS.get(codec.lower(), codec.lower())
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = 0
        self._writer: RowGroupWriter | None = None

    def add(self, rows: pa.Table) -> None:
        """Add rows in the schema given."""
        if not rows.num_rows:
            return
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= ROW_GROUP_ROWS or self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> WrittenFile | None:
        """Finish the file, which appears under its name; return what a commit needs of it, None without rows."""
        self._flush()
        if self._writer is None:
            return None
        writer, self._writer = self._writer, None
        writer.__exit__(None, None, None)
        writer.file.start_writeback()
        return WrittenFile(writer.add_action({"ds": self._ds}), writer.rows)

    def abandon(self) -> None:
        """Leave nothing of the file."""
        if self._writer is not None:
            with suppress(RuntimeError):
                self._writer.__exit__(RuntimeError, RuntimeError("abandoned"), None)
            self._writer = None

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = pa.concat_tables(self._waiting)
        if self._writer is None:
            self._writer = RowGroupWriter(
                self._table,
                f"ds={self._ds}",
                self._schema,
                self._codec,
                use_dictionary=dictionary_columns(rows),
                store_schema=False,
                is_durable=False,
            )
        self._waiting, self._rows, self._bytes = [], 0, 0
        self._writer.write(rows)


def data_file(table: Location, rows: pa.Table) -> dict[str, Any]:
    """Write a data file of a table without partitions, which no commit names yet; return its `add` action."""
    with RowGroupWriter(table, "", rows.schema, "snappy", store_schema=False, is_durable=False) as out:
        out.write(rows, ROW_GROUP_ROWS)
    return out.add_action({})


def rewritten_file(
    table: Location, add: Mapping[str, Any], parquet: pq.ParquetFile, schema: pa.Schema
) -> RowGroupWriter:
    """Begin a data file that takes the place of another, beside it and with its codec.

    Args:
        table: its folder.
        add: the `add` action of the other file.
        parquet: the other file, open.
        schema: of the new file.
    """
    codec = parquet.metadata.row_group(0).column(0).compression.lower() if parquet.num_row_groups else "snappy"
    return RowGroupWriter(table, str(add["path"]).rpartition("/")[0], schema, codec)


def statistics(metadata: pq.FileMetaData, schema: pa.Schema, nulls: Mapping[str, int]) -> str:
    """Delta's statistics of a file: rows, smallest and largest values and nulls of its first columns."""
    names = schema.names[:_STATISTICS_COLUMNS]
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for k in range(metadata.num_columns):
        name = metadata.schema.column(k).path
        if name not in names:  # a column within a list: Delta keeps no statistics of elements
            continue
        group_statistics = [metadata.row_group(g).column(k).statistics for g in range(metadata.num_row_groups)]
        ranges = [(s.min, s.max) for s in group_statistics if s is not None and s.has_min_max]
        # A row group without a range has only nulls, or values without an order.
        if len(ranges) < sum(1 for s in group_statistics if s is None or s.num_values):
            continue
        if ranges:
            low, high = _lower(min(r[0] for r in ranges)), _upper(max(r[1] for r in ranges))
            if low is not None and high is not None:
                least[name], most[name] = low, high
    counts = {name: nulls[name] for name in names}
    file_statistics = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": counts}
    return json.dumps(file_statistics, separators=(",", ":"), ensure_ascii=False)


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_STATISTICS_TEXT]
    return _spelled(value)


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= _STATISTICS_TEXT:
            return value
        # An upper bound of all texts with this prefix.
        return None if value[_STATISTICS_TEXT] == "\U0010ffff" else value[:_STATISTICS_TEXT] + "\U0010ffff"
    if isinstance(value, datetime) and value.microsecond % 1_000:
        value += timedelta(microseconds=1_000 - value.microsecond % 1_000)
    return _spelled(value)


def _spelled(value: Any) -> Any:
    """Return a value in Delta's statistics; None for one that has no place there."""
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
    """Return a file's Arrow schema. Times of 96 bits, which are Spark's instants, have the type of those of 64 bits."""
    schema = parquet.schema_arrow
    wide = {
        c.name for c in (parquet.schema.column(i) for i in range(len(parquet.schema))) if c.physical_type == "INT96"
    }
    for i, column in enumerate(schema):
        if column.name in wide:
            schema = schema.set(i, column.with_type(pa.timestamp("us", "UTC")))
    return schema
