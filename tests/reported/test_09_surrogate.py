"""Half an emoji in JSON lines: half a surrogate pair, which is no character."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
COLUMNS = [
    {"name": "event_id", "type": "string", "required": True},
    {"name": "user_id"},
    {"name": "title"},
    {"name": "tags", "type": "array<string>"},
    {"name": "clicked", "type": "int"},
]
NESTED = [*COLUMNS[:2], {"name": "title", "path": "page.title"}, *COLUMNS[3:]]
HALF = "\ud83d"
#: (event, user, title, tags); Python's json spells half a pair as \ud83d and a whole one as \ud83d\ude00.
ROWS = [
    ("e1", "u1", "whole \U0001f600", ["a"]),
    ("e2", "u2", f"half {HALF}", ["a"]),
    ("e3", "u3", "\ude00\U0001f600" + HALF + "!", ["a", HALF]),
    ("e4", "u4" + HALF, "an id", ["a"]),
    ("e5", "u4\ude00", "another id", ["a"]),
    ("e6" + HALF, "u6", "a key", ["a"]),
    ("e7", "u7", "a backslash before \\ud83d", ["\ufffd"]),
    ("e8", "u8", None, []),
]


@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("columns", [COLUMNS, NESTED], ids=["flat", "nested"])
def test_half_a_surrogate_pair(
    spark: SparkSession, tmp_path: Path, columns: list[dict[str, object]], ending: str
) -> None:
    lines = []
    for n, (event, user, title, tags) in enumerate(ROWS):
        title_field = {"page": {"title": title}} if columns is NESTED else {"title": title}
        lines.append(json.dumps({"event_id": event, "user_id": user, "tags": tags, "clicked": n % 2, **title_field}))
    body = "".join(f"{line}\n" for line in lines).encode()
    assert rb"\ud83d\ude00" in body
    assert rb"\\ud83d" in body
    write(tmp_path, {f"in/{DS}.jsonl{ending}": pa.compress(body, "zstd", asbytes=True) if ending else body})
    score = {"user": {"key": "user_id", "columns": []}, "item": {"key": "event_id", "columns": []}, "top_k": 1}
    spec = pipeline({"format": "jsonl", "path": f"in/{{ds}}.jsonl{ending}"}, columns, table={"keys": ["event_id"]})
    spec = type(spec).model_validate(spec.model_dump(exclude_unset=True, by_alias=True) | {"score": score})
    ws = Workspace(tmp_path)
    manifest = ingest(spec, ws, DS).manifest
    actual = read_table(spark, ws)
    assert dict(zip(actual.event_id, actual.title, strict=True)) == {
        "e1": "whole \U0001f600",
        "e2": "half \ufffd",
        "e3": "\ufffd\U0001f600\ufffd!",
        "e7": "a backslash before \\ud83d",
        "e8": None,
    }
    assert [list(tags) for tags in actual.tags] == [["a"], ["a"], ["a", "\ufffd"], ["\ufffd"], []]
    bad = read_table(spark, ws, "quarantine")
    assert bad._reason.tolist() == [
        "user_id: an id has half a surrogate pair",
        "user_id: an id has half a surrogate pair",
        "event_id: an id has half a surrogate pair",
    ]
    assert bad._raw.tolist() == lines[3:6]
    mended = {d["column"]: d["detail"] for d in manifest.facts["drift"] if d["change"] == "mended"}
    place = f"had half a surrogate pair and have U+FFFD in its place, in in/{DS}.jsonl{ending}"
    assert mended == {"title": f"2 values {place}", "tags": f"1 values {place}"}
