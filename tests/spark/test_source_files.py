"""Landing files in every compression, and CSV whose quoted fields have line breaks: rows and positions."""

from __future__ import annotations

import bz2
import csv
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.faults import BAD, GOOD
from tests.ingest_support import D1, event, jsonl, make_spec, put, run, table
from tests.spark.test_source_types import spec_of
from tests.spark.test_sources import judge, read

COLUMNS = [{"name": "id", "type": "int"}, {"name": "note", "type": "string"}, {"name": "price", "type": "double"}]


def zstandard(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data).to_pybytes())


def test_every_compression(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """The same rows from each; Snappy as Spark writes it; JSON lines and CSV; a byte that is no UTF-8."""
    rows = [f"{i},näh {i},{i / 4}" for i in range(300)]
    spark.createDataFrame([(r,) for r in rows], "value string").coalesce(1).write.option("compression", "snappy").text(
        str(tmp_path / "text")
    )
    (written,) = (tmp_path / "text").glob("*.snappy")
    plain = ("\n".join(rows) + "\n").encode()
    bad = b"1,\xff\xfe,2\n"
    files = {
        "a.csv": plain,
        "b.csv.gz": plain,
        "c.csv.bz2": bz2.compress(plain),
        "d.csv.zst": zstandard(plain[:1000]) + zstandard(plain[1000:] + bad),
        "e.csv.snappy": written.read_bytes(),
        "f.csv.zst": zstandard(b""),
    }
    read_rows = read(spark, ws, spec_of("csv", COLUMNS, header=False), files)
    for number in range(5):
        of_file = [(r["_line"], r["id"], r["note"], r["price"]) for r in read_rows if r["_file"] == number]
        assert of_file[:300] == [(i + 1, i, f"näh {i}", i / 4) for i in range(300)]
    broken = [(r["_file"], r["_line"], r["_reason"]) for r in read_rows if r["_state"] == BAD]
    assert broken == [(3, 301, "not UTF-8 text")]
    assert len(read_rows) == 5 * 300 + 1

    day = jsonl([event(i, D1) for i in range(5)])
    put(ws, f"in/{D1}/a.json.zst", zstandard(day))
    header = "id,ts,user,price\n"
    put(ws, f"in/{D1}/b.csv.bz2", bz2.compress((header + f"x,{D1}T01:00:00Z,1,2\n").encode()))
    manifest = run(make_spec(), ws, D1).manifest
    assert manifest.rows["kept"] == 6
    cut = zstandard(day)[:-5]
    put(ws, f"in/{D1}/a.json.zst", cut)
    with pytest.raises(UserError, match=r"a\.json\.zst cannot be read: it ends in the middle \(truncated\)"):
        run(make_spec(), ws, D1)


NOTES = ["two\nlines", '"quoted",\n\nwith a gap\n', "plain", "", 'end"s\r\nso', "a,b"]


def test_line_breaks_within_quotes(spark: SparkSession, ws: Workspace) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(["id", "no\nte", "price"])
    starts = []
    for i, note in enumerate(NOTES):
        starts.append(text.getvalue().count("\n") + 1)
        writer.writerow([i, note, i / 2])
    body = text.getvalue()
    lines = body.count("\n")
    broken = body + '8,"never closed,1\r\n9,fine,2\r\n'
    columns: list[dict[str, Any]] = [COLUMNS[0], {"name": "note", "type": "string", "path": "no\nte"}, COLUMNS[2]]
    files = {"a.csv": body, "c.csv": broken}
    rows = read(spark, ws, spec_of("csv", columns, multiline=True), files)
    for number in (0, 1):
        good = [r for r in rows if r["_file"] == number and r["_state"] == GOOD][: len(NOTES)]
        # What Python's reader makes of the same bytes; a line break within quotes may come out as a line feed.
        assert [(r["id"], r["price"]) for r in good] == [(i, i / 2) for i in range(len(NOTES))]
        assert [(r["note"] or "").replace("\r\n", "\n") for r in good] == [n.replace("\r\n", "\n") for n in NOTES]
        assert [r["_line"] for r in good] == starts
    rest = [(r["_line"], r["id"], r["_state"], r["_reason"]) for r in rows if r["_file"] == 1 and r["_line"] > lines]
    assert rest == [(lines + 1, None, BAD, "a quoted field is not closed"), (lines + 2, 9, GOOD, None)]
    _, judged = judge(spark, ws, spec_of("csv", columns, multiline=True), files)
    assert [sum(part.lines for part in judged.counts[number]) for number in (0, 1)] == [lines, lines + 2]

    # Through the stage: the lines of a record are counted as they are numbered.
    day = "id,ts,user,note\n" + "".join(f'e{i},{D1}T0{i}:00:00Z,{i},"a\nb {i}"\n' for i in range(4))
    put(ws, f"in/{D1}/a.csv.gz", day.encode())
    spec = make_spec({"multiline": True})
    assert run(spec, ws, D1).manifest.rows == {"read": 4, "kept": 4, "quarantined": 0, "duplicates": 0}
    rows = table(spark, ws, "events")
    assert [(r["note"], r["_source_line"]) for r in rows] == [(f"a\nb {i}", 2 + 2 * i) for i in range(4)]
