"""Small files of a Delta table that only grows (`delta.appendOnly`), joined by a commit that changes no row.

Delta lets nobody overwrite such a table, and the commits of its OPTIMIZE carry no token of a lease. So here files are
read and written without Spark, in bounded memory: row group by row group.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.log import file_path
from headrace.lake.delta.transaction import Transaction
from headrace.lake.ingest.data_file import statistics
from headrace.lake.parquet_rows import CODECS, row_groups, schema_of
from headrace.storage import Fence, Location

#: Of a file that joins others, about: as OPTIMIZE has it.
_FILE_BYTES = 1 << 30
#: Of a row group of it, about.
_GROUP_BYTES = 128 << 20


def join_files(table: Location, days: Sequence[str | None], size: float, fence: Fence | None) -> None:
    """Join the small files of some days, one commit a day. Rows stay the same, and so do older versions of the table.

    Files in which deletion vectors hide rows stay as they are, and so does one whose columns no other one's are.

    Args:
        table: its folder.
        days: partitions `ds`; None: the whole table.
        size: bytes; files with as many stay.
        fence: of the holder of the lease under which the table is written.

    Raises:
        UserError: the table uses features that headrace does not write, or another writer has changed it, or removed
            one of the files, meanwhile.
        LeaseLost: a later holder has committed; nothing was committed since.
    """
    for day in days:
        transaction = Transaction(table, fence=fence)
        small = [
            add
            for add in transaction.adds
            if add["size"] < size and not add.get("deletionVector") and day in (None, _day(add))
        ]
        joined: dict[str, Mapping[str, Any]] = {}
        gone: list[str] = []
        for files in _alike(table, small):
            add = _joined(table, files)
            joined[str(add["path"])] = add
            gone += [str(file["path"]) for file in files]
        if gone:
            transaction.join(gone, list(joined.values()))


def _alike(table: Location, adds: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Files that can be one: of the same partition and columns, in order, at least two, not too large together."""
    groups: list[tuple[dict[str, Any], pa.Schema, list[Mapping[str, Any]]]] = []
    for add in sorted(adds, key=lambda add: (add["modificationTime"], str(add["path"]))):
        partition, schema = dict(add["partitionValues"] or {}), schema_of(_opened(table, add))
        for values, columns, files in groups:
            whole = sum(file["size"] for file in files) + add["size"]
            if values == partition and columns.equals(schema) and whole <= _FILE_BYTES:
                files.append(add)
                break
        else:
            groups.append((partition, schema, [add]))
    yield from (files for _, _, files in groups if len(files) > 1)


def _joined(table: Location, adds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the rows of some files into one, beside the first. Nothing names it yet. The `add` action of it."""
    first = _opened(table, adds[0])
    schema = schema_of(first)
    codec = first.metadata.row_group(0).column(0).compression.lower() if first.num_row_groups else "snappy"
    new = file_path(table, str(adds[0]["path"])).parent / f"part-{uuid.uuid4()}.c000.{codec}.parquet"
    nulls, metadata = dict.fromkeys(schema.names, 0), list[Any]()
    with new.new_file() as path:
        with pq.ParquetWriter(path, schema, compression=CODECS.get(codec, codec), metadata_collector=metadata) as out:
            for rows in _large_groups(table, adds, schema):
                for name in nulls:
                    nulls[name] += rows.column(name).null_count
                out.write_table(rows, row_group_size=max(1, rows.num_rows))
    folder = str(adds[0]["path"]).rpartition("/")[0]
    return {
        "path": f"{folder}/{quote(new.name)}" if folder else quote(new.name),
        "partitionValues": dict(adds[0]["partitionValues"] or {}),
        "size": new.info().size,
        "modificationTime": time.time_ns() // 1_000_000,
        "dataChange": False,
        "stats": statistics(metadata[0], schema, nulls),
    }


def _large_groups(table: Location, adds: Sequence[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of files, several row groups at once where these are small, in the schema (see `schema_of`) of all."""
    some: list[pa.Table] = []
    for add in adds:
        for rows in row_groups(_opened(table, add)):
            # Times of 96 bits are read without their zone: else they are no one table with those of 64.
            some.append(rows.cast(schema))
            if sum(rows.nbytes for rows in some) >= _GROUP_BYTES:
                yield pa.concat_tables(some)
                some = []
    if some:
        yield pa.concat_tables(some)


def _opened(table: Location, add: Mapping[str, Any]) -> pq.ParquetFile:
    return pq.ParquetFile(file_path(table, str(add["path"])).local_path(), coerce_int96_timestamp_unit="us")


def _day(add: Mapping[str, Any]) -> str | None:
    return dict(add["partitionValues"] or {}).get("ds")
