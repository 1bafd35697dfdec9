"""The files that a task leaves in any store: whole ones that it names, or none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.config.schema import TableColumn
from headrace.lake.faults import BAD
from headrace.lake.landing.blocks import Declaration, Part, TimeRange
from headrace.lake.landing.repeats import load_hashes
from headrace.lake.landing.write_rows import ReadTask, SourceFile
from headrace.storage import Location, local
from tests.storage_support import home_of, left_over

DAY = "2026-01-01"
SCHEMA = pa.schema(
    [("user", pa.int64()), ("note", pa.string()), ("_source_file", pa.string()), ("_source_line", pa.int64())]
)


def task_of(home: Location, *files: Path) -> ReadTask:
    columns = (TableColumn(name="user", type="bigint"), TableColumn(name="note", type="string"))
    return ReadTask(
        (tuple(Part(i, local(file)) for i, file in enumerate(files)),),
        {i: SourceFile(DAY, file.name, TimeRange(None, 0), None) for i, file in enumerate(files)},
        Declaration(columns, (), "UTC", {}, {}, None),
        False,
        ("user",),
        home / "table",
        SCHEMA,
        home / "handed",
        "zstd",
    )


def rows_of(file: Location) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file.local_path(), partitioning=None).to_pylist()
    return rows


@pytest.mark.parametrize("kind", ["local", "objects"])
def test_good_rows_their_hashes_and_the_rows_that_are_judged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_of(kind, tmp_path, monkeypatch)
    lines = [json.dumps({"user": i, "note": f"n{i}"}) for i in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:4], "not JSON", *lines[4:]]))
    (tmp_path / "b.jsonl").write_text('{"user": "?", "note": "x"}\n')
    (result,) = task_of(home, tmp_path / "a.jsonl", tmp_path / "b.jsonl")(0)
    rows = rows_of(home / "table" / result["data"]["add"]["path"])
    assert [(r["user"], r["_source_line"]) for r in rows] == [(i, i + 1 + (i > 3)) for i in range(9)]
    judged = rows_of(home / "handed" / result["judged"])
    assert [{name: r[name] for name in ("_file", "_line", "_source_file", "_state")} for r in judged] == [
        {"_file": 0, "_line": 5, "_source_file": "a.jsonl", "_state": BAD},
        {"_file": 1, "_line": 1, "_source_file": "b.jsonl", "_state": BAD},
    ]
    assert [(r["_raw"], r["_reason"]) for r in judged] == [
        ("not JSON", "not a JSON object"),
        ('{"user": "?", "note": "x"}', "user: '?' is not a bigint"),
    ]
    hashes, keyed = load_hashes(home / "handed", result["hashes"])
    assert (len(set(hashes.tolist())), keyed.all()) == (9, True)


@pytest.mark.parametrize("kind", ["local", "objects"])
def test_nothing_of_a_file_that_is_damaged_further_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_of(kind, tmp_path, monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"user": 1, "note": "x"}\nnot JSON\n')
    body = bytearray(gzip.compress(b'{"user": 2, "note": "y"}\n' * 50_000))
    body[-6] ^= 0xFF
    (tmp_path / "b.jsonl.gz").write_bytes(body)
    (result,) = task_of(home, tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz")(0)
    assert set(result) == {"unreadable"}
    assert list(home.files()) == left_over(home) == []
