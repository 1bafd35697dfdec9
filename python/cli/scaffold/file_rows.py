"""The first rows of a data file: Parquet, ORC, Avro."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.storage import Location, StoreError

FileFormat = Literal["parquet", "orc", "avro"]
_PRIMITIVES: Mapping[str, pa.DataType] = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
#: Types that say more than the one that they are written as.
_LOGICAL: Mapping[str, pa.DataType] = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}


def file_rows(path: Location, format_: FileFormat, most: int) -> tuple[pa.Table, int]:
    """Return some of a file's first rows, with some of the last part of large files, and the number of all its rows.

    Of a large Avro file, which does not say how many rows it has, they are an estimate. Of a file in a store the parts
    that have these rows are fetched.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return _READERS[format_](path, most)
    except StoreError:  # which says nothing of the file
        raise
    except (OSError, ValueError, EOFError, pa.ArrowException) as e:
        message = " ".join(str(e).split())[:200]
        raise UserError(f"{path}: cannot be read as {format_.title()}: {message}") from None


def _parquet(path: Location, most: int) -> tuple[pa.Table, int]:
    # Many columns by one request each would take longer than what lies between them.
    with path.open_parts() as data, pq.ParquetFile(data, pre_buffer=path.scheme != "file") as file:
        return pa.Table.from_batches(_row_groups(file, most), file.schema_arrow), file.metadata.num_rows


def _row_groups(file: pq.ParquetFile, most: int) -> Iterator[pa.RecordBatch]:
    groups = _ends(file.num_row_groups, file.metadata.num_rows <= most)
    each = most if file.metadata.num_rows <= most else max(1, most // len(groups))
    for group in groups:
        left = each
        for batch in file.iter_batches(batch_size=min(each, 65_536), row_groups=[group]):
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                break


def _orc(path: Location, most: int) -> tuple[pa.Table, int]:
    # Late: few have such files.
    from pyarrow.orc import ORCFile

    with path.open() as data:
        file = ORCFile(data)
        stripes = _ends(file.nstripes, file.nrows <= most)
        each = most if file.nrows <= most else max(1, most // len(stripes))
        batches = [file.read_stripe(k).slice(0, each) for k in stripes]
        return pa.Table.from_batches(batches, file.schema), file.nrows


def _avro(path: Location, most: int) -> tuple[pa.Table, int]:
    # Late: few have such files.
    from fastavro import block_reader

    with path.open() as data:
        blocks = block_reader(data)
        record: Any = blocks.writer_schema
        schema = pa.schema([pa.field(f["name"], _avro_type(f["type"], f["name"])) for f in record["fields"]])
        rows: list[Any] = []
        seen = 0
        for block in blocks:
            seen += block.num_records
            rows += islice(block, most - len(rows))
            if len(rows) == most:
                seen = max(seen, round(seen * path.size() / data.tell()))
                break
    return pa.Table.from_pylist(rows, schema), seen


def _avro_type(type_: Any, place: str) -> pa.DataType:
    """Return the type as Spark reads it. Raises UserError for what has no columns of one type."""
    if isinstance(type_, list):
        non_null = [t for t in type_ if t != "null"]
        if len(non_null) == 1:
            return _avro_type(non_null[0], place)
        raise UserError(f"column '{place}' has values of several types: {', '.join(map(str, non_null))}")
    if isinstance(type_, str):
        type_ = {"type": type_}
    logical, name = type_.get("logicalType"), type_["type"]
    if logical == "decimal":
        return pa.decimal128(type_["precision"], type_.get("scale", 0))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    if name == "record":
        return pa.struct([pa.field(f["name"], _avro_type(f["type"], f"{place}.{f['name']}")) for f in type_["fields"]])
    if name == "array":
        return pa.list_(_avro_type(type_["items"], place))
    if name == "map":
        return pa.map_(pa.string(), _avro_type(type_["values"], place))
    if not isinstance(name, str):
        return _avro_type(name, place)
    if name not in _PRIMITIVES:
        raise UserError(f"column '{place}' is of Avro's type {name}, which is not looked at")
    return _PRIMITIVES[name]


def _ends(parts: int, all_: bool) -> list[int]:
    """Return the parts of a file to read: all, or the first and the last."""
    return list(range(parts)) if all_ else sorted({0, parts - 1})


_READERS: Mapping[FileFormat, Callable[[Location, int], tuple[pa.Table, int]]] = {
    "parquet": _parquet,
    "orc": _orc,
    "avro": _avro,
}
