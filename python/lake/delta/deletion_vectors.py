"""Deletion vectors: the positions of a data file's rows that a version of a Delta table has deleted.

Written to Delta's protocol document (PROTOCOL.md of delta-io/delta, "Deletion Vectors") and to the portable format of
32-bit Roaring bitmaps (RoaringFormatSpec).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.lake.delta.data_files import row_groups
from headrace.lake.delta.log import file_path
from headrace.storage import Location

#: Magic number of the format of 64-bit positions: 32-bit bitmaps by the upper half.
_MAGIC = 1681511377
#: First number of a 32-bit bitmap, without and with run containers.
_COOKIE_PLAIN, _COOKIE_RUNS = 12346, 12347
#: Bitmaps with runs and fewer containers than this have no offsets.
_NO_OFFSETS = 4
#: Containers of more values than this are bitmaps of 65,536 bits, others arrays.
_ARRAY_VALUES = 4096
_BITMAP_BYTES = 8192
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def deleted_positions(table: Location, add: Mapping[str, Any]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions (int64, ascending, from 0) of the rows that the deletion vector of a live file deletes.

    Args:
        table: the table's folder.
        add: the `add` action; without a deletion vector the result is empty.

    Raises:
        UserError: the vector is damaged, or its file is gone.
    """
    vector = add.get("deletionVector")
    if not vector:
        return np.empty(0, np.int64)
    try:
        positions = _positions(_vector_bytes(table, vector))
    except (OSError, ValueError, struct.error) as e:
        raise UserError(f"{table}: the deletion vector of {add['path']} cannot be read: {e}") from e
    if len(positions) != vector["cardinality"]:
        raise UserError(
            f"{table}: the deletion vector of {add['path']} has {len(positions):,} rows, and the log says "
            f"{vector['cardinality']:,}"
        )
    return positions


def live_row_groups(
    table: Location, add: Mapping[str, Any], parquet: pq.ParquetFile, columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the row groups of a data file one after the other, without the rows that its deletion vector deletes.

    Args:
        table: the table's folder.
        add: the file's `add` action.
        parquet: the open file.
        columns: to read; None: all.

    Raises:
        UserError: see `deleted_positions`.
    """
    deleted, first = deleted_positions(table, add), 0
    for rows in row_groups(parquet, columns):
        of_group = deleted[np.searchsorted(deleted, first) : np.searchsorted(deleted, first + rows.num_rows)] - first
        first += rows.num_rows
        if len(of_group):
            is_live = np.ones(rows.num_rows, np.bool_)
            is_live[of_group] = False
            rows = rows.filter(pa.array(is_live))
        yield rows


def vector_file(name: str) -> str:
    """Return the path, below the table, of a vector's file by its name in the log: a prefix and a UUID in Base85."""
    prefix, code = name[:-20], name[-20:]
    digits = _decoded(code).hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return f"{prefix}/deletion_vector_{uuid}.bin" if prefix else f"deletion_vector_{uuid}.bin"


def _vector_bytes(table: Location, vector: Mapping[str, Any]) -> bytes:
    """Return the serialized bitmaps, from the log itself or from a file (version, then size, data and checksum of
    each).
    """
    kind, name = vector["storageType"], str(vector["pathOrInlineDv"])
    if kind == "i":
        return _decoded(name)
    if kind not in ("u", "p"):
        raise ValueError(f"storage type '{kind}' is not known")
    file = table / vector_file(name) if kind == "u" else file_path(table, name)
    content, offset = file.read_bytes(), int(vector.get("offset") or 1)
    (size,) = struct.unpack_from(">i", content, offset)
    data = content[offset + 4 : offset + 4 + size]
    if size != vector["sizeInBytes"] or len(data) != size:
        raise ValueError(f"{file} has not the {vector['sizeInBytes']:,} bytes that the log says")
    if struct.unpack_from(">I", content, offset + 4 + size)[0] != zlib.crc32(data):
        raise ValueError(f"the checksum in {file} is another one")
    return data


def _positions(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    magic, count = struct.unpack_from("<iq", data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic}")
    parts, offset = [np.empty(0, np.int64)], 12
    for _ in range(count):
        (upper,) = struct.unpack_from("<I", data, offset)
        values, offset = _bitmap(data, offset + 4)
        parts.append(values.astype(np.int64) + (upper << 32))
    return np.concatenate(parts)


def _bitmap(data: bytes, offset: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
    """Return the values of a 32-bit bitmap, and where it ends."""
    (cookie,) = struct.unpack_from("<I", data, offset)
    offset += 4
    has_runs = np.zeros(0, np.bool_)
    if cookie & 0xFFFF == _COOKIE_RUNS:
        containers = (cookie >> 16) + 1
        flags = np.frombuffer(data, np.uint8, (containers + 7) // 8, offset)
        has_runs = np.unpackbits(flags, bitorder="little").astype(np.bool_)
        offset += len(flags)
    elif cookie == _COOKIE_PLAIN:
        (containers,) = struct.unpack_from("<I", data, offset)
        offset += 4
    else:
        raise ValueError(f"a bitmap begins with {cookie}")
    header = np.frombuffer(data, "<u2", 2 * containers, offset).astype(np.int64).reshape(-1, 2)
    offset += 4 * containers
    if not len(has_runs) or containers >= _NO_OFFSETS:
        offset += 4 * containers
    parts = [np.empty(0, np.int64)]
    for i, (upper, below) in enumerate(header.tolist()):
        if len(has_runs) and has_runs[i]:
            (runs,) = struct.unpack_from("<H", data, offset)
            pairs = np.frombuffer(data, "<u2", 2 * runs, offset + 2).astype(np.int64).reshape(-1, 2)
            offset += 2 + 4 * runs
            values = np.concatenate([np.arange(start, start + length + 1) for start, length in pairs.tolist()])
        elif below + 1 > _ARRAY_VALUES:
            bits = np.frombuffer(data, np.uint8, _BITMAP_BYTES, offset)
            offset += _BITMAP_BYTES
            values = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        else:
            values = np.frombuffer(data, "<u2", below + 1, offset).astype(np.int64)
            offset += 2 * (below + 1)
        parts.append(values + (upper << 16))
    return np.concatenate(parts), offset


def _decoded(text: str) -> bytes:
    """Bytes of a text in Z85, as the protocol has Base85."""
    decoded = bytearray()
    for i in range(0, len(text), 5):
        value = 0
        for letter in text[i : i + 5]:
            value = value * 85 + _Z85.index(letter)
        decoded += value.to_bytes(4, "big")
    return bytes(decoded)
