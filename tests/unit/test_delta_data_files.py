"""Statistics in the log of each data file that headrace writes, against those that pyarrow computes of its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from headrace.lake.delta import data_files
from headrace.lake.delta.compact import join_files
from headrace.lake.delta.data_files import DataFileWriter, data_file
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import create_table
from headrace.storage import Location, local

DS = "2026-01-08"
FIRST = datetime(2026, 1, 8, 0, 0, 0, 123_456, UTC)
LONG = "x" * 31
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("user", pa.string()),
        ("time", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("price", pa.float64()),
        ("clicked", pa.bool_()),
        ("items", pa.list_(pa.field("element", pa.int32()))),
        ("empty", pa.string()),
        # Delta keeps statistics of the first 32 columns alone.
        *((f"extra{n}", pa.int32()) for n in range(30)),
    ]
)


def rows(start: int, count: int) -> pa.Table:
    """Return rows with nulls in each column but the first; texts are around the 32 characters that statistics keep."""
    numbers = range(start, start + count)
    columns = {
        "id": list(numbers),
        "user": [None if n % 5 == 1 else f"{n % 10}{LONG}{'tail' * (n % 2)}" for n in numbers],
        "time": [None if n % 7 == 2 else FIRST + timedelta(microseconds=1_001 * n) for n in numbers],
        "day": [None if n % 4 == 3 else date(2026, 1, 1 + n % 20) for n in numbers],
        "price": [None if n % 3 == 1 else n / 4 for n in numbers],
        "clicked": [None if n % 6 == 5 else n % 2 == 0 for n in numbers],
        "items": [None if n % 8 == 7 else list(range(n % 3)) for n in numbers],
        "empty": [None] * count,
    }
    extra = {f"extra{k}": [None if (n + k) % 9 == 0 else n * k for n in numbers] for k in range(30)}
    return pa.table(columns | extra, SCHEMA)


def ingested(table: Location) -> list[dict[str, Any]]:
    """Return the actions of the writer that ingest uses: a file of a day, in several row groups."""
    writer = DataFileWriter(table, DS, SCHEMA, "snappy")
    for start in range(0, 60, 20):
        writer.add(rows(start, 20))
    file = writer.close()
    assert file is not None
    return [file.add_action()]


def appended(table: Location) -> list[dict[str, Any]]:
    """Return the actions of files that are appended to tables without partitions."""
    return [data_file(table, rows(0, 40)), data_file(table, rows(40, 0))]


def _partitioned(table: Location, counts: list[int]) -> None:
    """Make a table of a day, with files that another writer wrote, each in row groups of 7 rows."""
    adds, start = [], 0
    for number, count in enumerate(counts):
        path = f"ds={DS}/{number}.parquet"
        with (table / path).new_file() as file:
            pq.write_table(rows(start, count), file, row_group_size=7, compression="zstd")
        size = (table / path).size()
        adds.append(
            {"path": path, "partitionValues": {"ds": DS}, "size": size, "modificationTime": number}
            | {"dataChange": True, "stats": json.dumps({"numRecords": count})}
        )
        start += count
    fields = [{"name": name, "type": "string", "nullable": True, "metadata": {}} for name in (*SCHEMA.names, "ds")]
    create_table(table, fields, ["ds"], adds)


def _new_adds(table: Location) -> list[dict[str, Any]]:
    return [action["add"] for action in DeltaLog(table).actions(1) if "add" in action]


def joined(table: Location) -> list[dict[str, Any]]:
    """Return the actions of a file that replaces small ones."""
    _partitioned(table, [10, 15, 20])
    join_files(table, [DS], 1 << 20, None)
    return _new_adds(table)


def erased(table: Location) -> list[dict[str, Any]]:
    """Return the actions of files that were rewritten without some rows; a file without any row left is removed."""
    _partitioned(table, [10, 15, 20])

    def without_first(some: pa.Table) -> tuple[pa.Table, int]:
        stays = pc.greater_equal(some["id"], 12)
        return some.filter(stays), some.num_rows - pc.sum(stays.cast(pa.int64())).as_py()

    erase(table, Change(("id",), without_first), "a request", delete=True)
    return _new_adds(table)


@pytest.mark.parametrize(
    ("write", "partition", "changes_data", "row_counts"),
    [
        (ingested, {"ds": DS}, True, [60]),
        (appended, {}, True, [40, 0]),
        (joined, {"ds": DS}, False, [45]),
        (erased, {"ds": DS}, True, [13]),
    ],
)
def test_the_log_says_of_a_file_what_its_rows_are(
    write: Callable[[Location], list[dict[str, Any]]],
    partition: dict[str, str],
    changes_data: bool,
    row_counts: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_files, "ROW_GROUP_ROWS", 20)
    adds = write(local(tmp_path / "table"))
    assert [json.loads(add["stats"])["numRecords"] for add in adds] == row_counts
    for add in adds:
        file = tmp_path / "table" / add["path"]
        assert add == {
            "path": f"{''.join(f'{k}={v}/' for k, v in partition.items())}{file.name}",
            "partitionValues": partition,
            "size": file.stat().st_size,
            "modificationTime": add["modificationTime"],
            "dataChange": changes_data,
            "stats": add["stats"],
        }
        assert abs(add["modificationTime"] - file.stat().st_mtime * 1_000) < 60_000
        assert json.loads(add["stats"]) == statistics_of(pq.read_table(file, partitioning=None))


def statistics_of(table: pa.Table) -> dict[str, Any]:
    """Compute Delta's statistics of rows."""
    first, bounds = (
        table.select(table.column_names[:32]),
        {"minValues": dict[str, Any](), "maxValues": dict[str, Any]()},
    )
    for name in first.column_names:
        column = first[name]
        if pa.types.is_list(column.type) or pa.types.is_boolean(column.type) or column.null_count == len(column):
            continue
        least, most = (pc.min(column).as_py(), pc.max(column).as_py())
        if isinstance(least, str):
            # A shorter text is below all that begin with it; the last character of Unicode is above them.
            least, most = least[:32], most if len(most) <= 32 else most[:32] + "\U0010ffff"
        elif isinstance(least, datetime):
            least, most = (_milliseconds(moment) for moment in (least, most + timedelta(microseconds=999)))
        elif isinstance(least, date):
            least, most = least.isoformat(), most.isoformat()
        bounds["minValues"][name], bounds["maxValues"][name] = least, most
    nulls = {name: first[name].null_count for name in first.column_names}
    return {"numRecords": len(table), **bounds, "nullCount": nulls}


def _milliseconds(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
