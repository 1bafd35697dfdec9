"""Inputs 14 and 24: JSON lines in gzip files of very many members, cut anywhere; and very many files of three rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config.schema import TableColumn
from headrace.lake.landing.blocks import Declaration, Part, TimeRange
from headrace.lake.landing.write_rows import ReadTask, SourceFile
from headrace.storage import local

DAY = "2026-01-06"
ROWS = [{"event_id": i, "price": i / 4, "clicked": i % 2} for i in range(1_500)]
LINES = [json.dumps(row) for row in ROWS]
COLUMNS = (
    TableColumn(name="event_id", type="bigint", required=True),
    TableColumn(name="price", type="double"),
    TableColumn(name="clicked", type="int", required=True),
)
SCHEMA = pa.schema({"event_id": pa.int64(), "price": pa.float64(), "clicked": pa.int32()})
SCHEMA = SCHEMA.append(pa.field("_source_file", pa.string())).append(pa.field("_source_line", pa.int64()))


def bytes_of(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def members(size: int) -> bytes:
    """Members that are cut in the middle of lines, and an empty one, as bgzip writes at the end."""
    data = bytes_of(LINES)
    return b"".join(gzip.compress(data[i : i + size]) for i in range(0, len(data), size)) + gzip.compress(b"")


def read_by_arrow(home: Path, *files: Path) -> pa.Table:
    """The good rows of files, by the task that Spark schedules; no line is left for Spark's rules."""
    task = ReadTask(
        (tuple(Part(i, local(file)) for i, file in enumerate(files)),),
        {i: SourceFile(DAY, file.name, TimeRange(None, 0), None) for i, file in enumerate(files)},
        Declaration(COLUMNS, (), "UTC", {}, {}, None),
        False,
        ("event_id",),
        local(home / "table"),
        SCHEMA,
        local(home / "handed"),
        "zstd",
    )
    (result,) = task(0)
    return pq.read_table(home / "table" / result["data"]["add"]["path"], partitioning=None)


@pytest.mark.parametrize("form", ["a member a line", "members of 777 bytes", "members of 100,000 bytes"])
def test_all_rows_of_all_members_come(tmp_path: Path, form: str) -> None:
    each = b"".join(gzip.compress(bytes_of([line])) for line in LINES)
    data = {"a member a line": each, "members of 777 bytes": members(777)}.get(form, members(100_000))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(data)
    rows = read_by_arrow(tmp_path, file)
    assert rows.select(["event_id", "price", "clicked"]).to_pylist() == ROWS
    assert rows["_source_line"].to_pylist() == list(range(1, 1_501))
    # In capitals the ending is the same.
    capitals = tmp_path / "A.JSONL.GZ"
    capitals.write_bytes(data)
    assert read_by_arrow(tmp_path, capitals)["event_id"].to_pylist() == list(range(1_500))


def test_a_file_a_minute(tmp_path: Path) -> None:
    files = []
    for i in range(0, 1_440, 3):
        files.append(tmp_path / f"{i:05}.json.gz")
        files[-1].write_bytes(gzip.compress(bytes_of(LINES[i : i + 3])))
    rows = read_by_arrow(tmp_path, *files)
    assert rows.select(["event_id", "price", "clicked"]).to_pylist() == ROWS[:1_440]
    assert rows["_source_line"].to_pylist() == [1, 2, 3] * 480
    assert rows["_source_file"].to_pylist() == [f"{i // 3 * 3:05}.json.gz" for i in range(1_440)]
