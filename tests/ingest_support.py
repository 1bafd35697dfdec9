"""A pipeline that ingests small files, for the tests of the stage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.stage import Ingest
from headrace.stage import Outcome, run_stage

D1, D2, D3, D4 = "2026-03-01", "2026-03-02", "2026-03-03", "2026-03-04"
COLUMNS = [
    {"name": "id", "type": "string", "required": True},
    {"name": "ts", "type": "timestamp", "required": True},
    {"name": "user", "type": "bigint", "required": True},
    {"name": "price", "type": "double"},
    {"name": "hour", "type": "int"},
    {"name": "tags", "type": "array<string>"},
    {"name": "sizes", "type": "array<int>"},
    {"name": "note", "type": "string"},
]
NAMES = [str(c["name"]) for c in COLUMNS]
POSITION = ("_source_file", "_source_line")


def make_spec(source: Mapping[str, Any] | None = None, **table: Any) -> Spec:
    defaults: dict[str, Any] = {
        "columns": COLUMNS,
        "keys": ["id"],
        "event_time": "ts",
        "late_days": 1,
        "expectations": {"max_bad_rate": 1, "ranges": {"hour": [0, 23]}},
    }
    return build_spec(
        {
            "pipeline": "shop",
            "source": {"format": "clicks", "path": "in/{ds}/*", **(source or {})},
            "table": defaults | table,
            "features": {"label": "hour", "workflow": [], "split": {"by": "position"}},
        }
    )


def event(number: int, ds: str, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"e{number}",
        "ts": f"{ds}T{number % 24:02d}:30:00.500Z",
        "user": 2**53 + number,
        "price": number / 4,
        "hour": number % 24,
        "tags": ["a", f"t{number}"],
        "sizes": [number, None],
        "note": f'it\'s "{number}", é',
    }
    return row | changes


def jsonl(rows: Sequence[Mapping[str, Any] | str]) -> bytes:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    return "".join(f"{line}\n" for line in lines).encode()


def put(ws: Workspace, name: str, body: bytes) -> Path:
    path = ws.home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if name.endswith(".gz") else body)
    return path


def run(spec: Spec, ws: Workspace, ds: str) -> Outcome:
    return run_stage(Ingest(), spec, ws, ds)


def table(spark: SparkSession, ws: Workspace, name: str, version: int | None = None) -> list[dict[str, Any]]:
    """All rows of a table, in the order of the source."""
    reader = spark.read.format("delta")
    if version is not None:
        reader = reader.option("versionAsOf", version)
    rows = [r.asDict() for r in reader.load(str(ws.table("shop", name))).collect()]
    return sorted(rows, key=lambda r: (r["ds"], r["_source_file"], r["_source_line"]))


def ids(ws: Workspace, version: int | None = None) -> dict[str, list[str]]:
    """Ids of the events by day, in the order of the source: the table's log replayed, its live files read by Arrow."""
    folder = ws.table("shop", "events").local_path()
    commits = sorted((folder / "_delta_log").glob("*.json"))
    assert commits, f"{folder} is no table"
    live: dict[str, str] = {}
    for path in commits[: None if version is None else version + 1]:
        for line in path.read_text().splitlines():
            action = json.loads(line)
            if "remove" in action:
                del live[action["remove"]["path"]]
            if "add" in action:
                assert "deletionVector" not in action["add"]
                live[action["add"]["path"]] = action["add"]["partitionValues"]["ds"]
    rows = []
    for path, ds in live.items():
        read = pq.read_table(folder / unquote(path), columns=[*POSITION, "id"], partitioning=None)
        rows += [(ds, *row) for row in zip(*read.to_pydict().values(), strict=True)]
    by_day: dict[str, list[str]] = {}
    for ds, _, _, id_ in sorted(rows):
        by_day.setdefault(ds, []).append(id_)
    return by_day


def version(ws: Workspace) -> int | None:
    return DeltaLog(ws.table("shop", "events")).version
