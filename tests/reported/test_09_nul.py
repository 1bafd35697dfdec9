"""Input 09: ids with a NUL character, which PostgreSQL takes in no text; the neighbours are empty and very long ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported import support

DAY = "2026-01-08"
COLUMNS = [
    {"name": "ts", "type": "timestamp", "required": True},
    {"name": "user_id", "type": "string", "required": True},
    {"name": "item_id", "type": "string", "required": True},
    {"name": "device", "type": "string"},
    {"name": "clicked", "type": "int", "required": True},
    {"name": "tags", "type": "array<string>"},
]
#: user, item, device, tags -> the reason for quarantine; None: a good row.
ROWS: list[tuple[str, str, str | None, list[str], str | None]] = [
    ("u1", "i1", "phone", ["a"], None),
    ("u1\0", "i1", "phone", [], "user_id: an id has a NUL character"),
    ("u2", "\0", "phone", [], "item_id: an id has a NUL character"),
    ("", "i2", "phone", [], "user_id: an id is empty"),
    ("u3", "x" * 480, "phone", [], None),
    ("u3", "x" * 481, "phone", [], f"item_id: '{'x' * 100}' has 481; an id has at most 480 bytes"),
    # Bytes, not characters.
    ("ü" * 240, "i3", "phone", [], None),
    ("ü" * 241, "i3", "phone", [], f"user_id: '{'ü' * 100}' has 482; an id has at most 480 bytes"),
    ("u4", "i4", "pho\0ne", [], "device: a text has a NUL character"),
    ("u4", "i4", "", ["b"], None),
    ("u4", "i4", "d" * 4000, [], None),
    ("u4", "i5", None, ["a", "b\0"], "tags: a text has a NUL character"),
    ("u\\u0000", "i6", "phone", [], None),
    ("\0headrace", "i6", "phone", [], "user_id: an id has a NUL character"),
    ("u5", "i6", None, [], None),
]


def records() -> list[dict[str, Any]]:
    return [
        {"ts": f"{DAY}T10:00:{i:02d}Z", "user_id": u, "item_id": item, "device": d, "clicked": i % 2, "tags": tags}
        for i, (u, item, d, tags, _) in enumerate(ROWS)
    ]


def source(kind: str, folder: Path) -> dict[str, Any]:
    """The rows as JSON lines that Arrow reads, as compressed JSON lines, and as a table."""
    if kind == "table":
        fields = [("ts", pa.string()), ("user_id", pa.string()), ("item_id", pa.string()), ("device", pa.string())]
        schema = pa.schema([*fields, ("clicked", pa.int32()), ("tags", pa.list_(pa.string()))])
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist(records(), schema), folder / "rows.parquet")
        return {"format": "parquet", "path": str(folder)}
    lines = "".join(json.dumps(r, ensure_ascii=i % 2 == 0) + "\n" for i, r in enumerate(records())).encode()
    ending, body = (".zst", pa.compress(lines, "zstd", asbytes=True)) if kind == "spark" else ("", lines)
    support.write(folder, {f"{DAY}.jsonl{ending}": body})
    return {"format": "jsonl", "path": f"{folder}/{{ds}}.jsonl{ending}"}


def pipeline(kind: str, folder: Path, **table: Any) -> Any:
    from headrace.config import build_spec

    spec = support.pipeline(source(kind, folder), COLUMNS, table=table)
    score = {"user": {"key": "user_id"}, "item": {"key": "item_id"}}
    return build_spec(spec.model_dump(exclude_unset=True, by_alias=True) | {"score": score})


@pytest.mark.parametrize("kind", ["arrow", "spark", "table"])
def test_rows_with_unfit_ids_go_to_quarantine(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    spec, ws = pipeline(kind, tmp_path / "in"), Workspace(tmp_path)
    outcome = support.ingest(spec, ws, DAY)
    bad = [reason for *_, reason in ROWS if reason is not None]
    assert outcome.manifest.rows["quarantined"] == len(bad)
    quarantined = support.read_table(spark, ws, "quarantine")
    assert sorted(quarantined["_reason"]) == sorted(bad)
    if kind != "table":
        retained = support.read_table(spark, ws)
        assert list(retained["user_id"]) == [u for u, *_, reason in ROWS if reason is None]
        assert list(retained["item_id"]) == [i for _, i, *_, reason in ROWS if reason is None]


def test_limits_can_be_lifted(spark: SparkSession, tmp_path: Path) -> None:
    keep = {"ids": {"max_bytes": None, "empty": "keep", "nul": "keep"}, "text_nul": "keep"}
    for kind in ("arrow", "spark"):
        spec, ws = pipeline(kind, tmp_path / kind, **keep), Workspace(tmp_path / f"home-{kind}")
        assert support.ingest(spec, ws, DAY).manifest.rows["quarantined"] == 0
        assert list(support.read_table(spark, ws)["user_id"]) == [u for u, *_ in ROWS]
