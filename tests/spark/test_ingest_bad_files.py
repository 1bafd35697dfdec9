"""Landing files that cannot be read: each is named, and the day stops, or goes on without them as the spec says."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.cli.summary import data_lines
from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.report.blocks import Cell, Day, ReportTable
from headrace.quality.report.data import data_quality
from headrace.stage.manifest import Manifest
from tests.ingest_support import D1, D2, event, ids, jsonl, make_spec, put, run, version

HEADER = b"id,ts,user,price,hour,tags,sizes,note\n"


def body(first: int, rows: int, ds: str = D1) -> bytes:
    return jsonl([event(n, ds) for n in range(first, first + rows)])


def csv(first: int, rows: int, ds: str = D1) -> bytes:
    lines = (f"e{n},{ds}T{n % 24:02d}:30:00Z,{n},{n / 4},{n % 24},a,1,x" for n in range(first, first + rows))
    return HEADER + "".join(f"{line}\n" for line in lines).encode()


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0xFF]) + data[len(data) // 2 + 1 :]


#: name of the file -> (its whole content, what became of it, and what the message says).
BAD: dict[str, tuple[bytes, Callable[[bytes], bytes], str]] = {
    "b.json.gz": (gzip.compress(body(100, 3000)), truncated, "cannot be read: it ends in the middle (truncated)"),
    "b.csv.gz": (gzip.compress(csv(100, 3000)), flipped, "its gzip data are damaged"),
    "b.json.zst": (pa.compress(body(100, 3000), "zstd", asbytes=True), truncated, "cannot be read: "),
    "b.csv": (
        csv(100, 30),
        lambda data: data.decode().encode("utf-16"),
        "its first line, the header, is not UTF-8 text",
    ),
    "b.txt": (csv(100, 30), lambda data: HEADER.replace(b"note", b"id") + data, "its header names column 'id' twice"),
}
#: Further ways to a file's end, which take the stage as long.
MORE = ("b.csv.gz", "b.json.zst", "b.txt")


def spec_with(most: int) -> Spec:
    return make_spec(expectations={"max_bad_rate": 1, "max_bad_files": most})


def status_lines(manifest: Manifest) -> list[str]:
    return [line for line in data_lines({"ingest": manifest}, manifest.ds) if line]


@pytest.mark.parametrize("name", ["b.json.gz", "b.csv", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_day_goes_on_without_it_and_takes_it_when_it_comes_again(
    spark: SparkSession, ws: Workspace, name: str
) -> None:
    del spark
    content, damage, reason = BAD[name]
    put(ws, f"in/{D1}/a.json", body(0, 20))
    file = Path(f"{ws.home}/in/{D1}/{name}")
    file.write_bytes(damage(content))
    put(ws, f"in/{D1}/c.csv", csv(50, 10))
    # The default: the file is named, and nothing of the day is loaded.
    with pytest.raises(UserError, match="max_bad_files") as refused:
        run(make_spec(), ws, D1)
    message = str(refused.value)
    assert message.startswith(f"landing file in/{D1}/{name}")
    assert reason in message
    assert "\n" not in message
    assert ids(ws) == {}

    manifest = run(spec_with(1), ws, D1).manifest
    other_ids = [f"e{n}" for n in range(20)] + [f"e{n}" for n in range(50, 60)]
    assert ids(ws) == {D1: other_ids}
    assert manifest.rows == {"read": 30, "kept": 30, "quarantined": 0, "duplicates": 0}
    (bad,) = manifest.facts["bad_files"]
    assert (bad["ds"], bad["file"]) == (D1, f"in/{D1}/{name}")
    assert reason in bad["reason"]
    check = next(c for c in manifest.facts["expectations"] if c["name"] == "max_bad_files")
    assert (check["value"], check["limit"], check["ok"]) == (1, 1, True)
    assert status_lines(manifest)[0] == f"warning: landing file in/{D1}/{name} was left out: {bad['reason']}"
    blocks = data_quality(Day(spec_with(1), D1, {"ingest": manifest})).blocks
    (table,) = (b for b in blocks if isinstance(b, ReportTable) and b.title == "Files left out")
    assert table.rows == ((D1, Cell(f"in/{D1}/{name}", code=True), bad["reason"]),)
    # What is as it was is not looked at again.
    version_before = version(ws)
    assert run(spec_with(1), ws, D1).skipped
    assert version(ws) == version_before

    file.write_bytes(content)
    manifest = run(spec_with(1), ws, D1).manifest
    rows = 3000 if len(content) > 3000 else 30
    assert sorted(ids(ws)[D1]) == sorted([*other_ids, *(f"e{n}" for n in range(100, 100 + rows))])
    assert "bad_files" not in manifest.facts
    assert status_lines(manifest) == []


def test_more_of_them_than_the_spec_allows(spark: SparkSession, ws: Workspace) -> None:
    del spark
    put(ws, f"in/{D1}/a.json", body(0, 5))
    put(ws, f"in/{D2}/a.json", body(200, 5, D2))
    for name in ("b", "c"):
        path = put(ws, f"in/{D2}/{name}.json.gz", body(100, 500, D2))
        path.write_bytes(truncated(path.read_bytes()))
    with pytest.raises(UserError) as refused:
        run(spec_with(1), ws, D2)
    # Tasks come upon them in any order.
    assert re.match(
        rf"landing file in/{D2}/[bc]\.json\.gz cannot be read: .*; nor can in/{D2}/[bc]\.", str(refused.value)
    )
    assert ids(ws) == {D1: [f"e{n}" for n in range(5)]}  # days before it are loaded
    manifest = run(spec_with(2), ws, D2).manifest
    assert ids(ws)[D2] == [f"e{n}" for n in range(200, 205)]
    assert sorted(b["file"] for b in manifest.facts["bad_files"]) == [f"in/{D2}/b.json.gz", f"in/{D2}/c.json.gz"]


def test_a_day_needs_a_file_that_can_be_read(spark: SparkSession, ws: Workspace) -> None:
    del spark
    path = put(ws, f"in/{D1}/a.json.gz", body(0, 500))
    path.write_bytes(truncated(path.read_bytes()))
    with pytest.raises(UserError, match=rf"landing file in/{D1}/a\.json\.gz cannot be read"):
        run(spec_with(9), ws, D1)
    assert ids(ws) == {}
