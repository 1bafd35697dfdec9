"""The shape of the export of Google Analytics 4 as JSON lines: microseconds, lists of records of keys and values."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
START = datetime.fromisoformat(DS)
COLUMNS: list[dict[str, Any]] = [
    {"name": "ts", "type": "timestamp", "path": "event_timestamp", "required": True},
    {"name": "server_ts", "type": "timestamp"},
    {"name": "user", "path": "user_pseudo_id"},
    {"name": "items", "type": "array<string>", "path": "items[].item_id"},
    {"name": "prices", "type": "array<double>", "path": "items[].price"},
    {"name": "first_item", "path": "items[0].item_id"},
    {"name": "page", "path": "event_params['page_location'].value.string_value"},
    {"name": "session", "type": "bigint", "path": "event_params.ga_session_id.value.int_value"},
    {"name": "clicked", "type": "int"},
]


def event(n: int) -> dict[str, Any]:
    micros = 1767830400_000000 + 123_456_789 * n
    params = [
        {"key": "page_location", "value": {"string_value": f"/p/{n}"}},
        {"key": "ga_session_id", "value": {"int_value": str(7 * 10**15 + n) if n % 2 else 7 * 10**15 + n}},
    ]
    items = [{"item_id": f"i{n}", "price": n / 4}, {"item_id": f"i{n + 1}"}][: n % 3]
    return {
        "event_timestamp": micros,
        "server_ts": micros * 1000 + 999,
        "user_pseudo_id": f"{100000 + n}.16",
        "items": items,
        "event_params": params[: 1 + n % 2] if n % 5 else None,
        "clicked": n % 2,
    }


@pytest.mark.parametrize("ending", ["", ".zst"])
def test_records_in_lists(spark: SparkSession, tmp_path: Path, ending: str) -> None:
    events = [event(n) for n in range(90)]
    bad = [event(0) | {"items": "none"}, event(0) | {"items": [{"price": "x"}]}, event(0) | {"event_params": [1]}]
    body = "".join(f"{json.dumps(e)}\n" for e in [*events, *bad]).encode()
    write(tmp_path, {f"in/{DS}.jsonl{ending}": pa.compress(body, "zstd", asbytes=True) if ending else body})
    units = {"ts": "epoch_microseconds", "server_ts": "epoch_nanoseconds"}
    source = {"format": "jsonl", "path": f"in/{{ds}}.jsonl{ending}", "timestamps": units}
    ws = Workspace(tmp_path)
    manifest = ingest(pipeline(source, COLUMNS, table={"event_time": "ts"}), ws, DS).manifest
    assert (manifest.rows["kept"], manifest.rows["quarantined"]) == (len(events), len(bad))
    assert manifest.facts["drift"] == []
    actual = read_table(spark, ws)
    moments = [START + timedelta(microseconds=123_456_789 * n) for n in range(len(events))]
    assert actual.ts.tolist() == actual.server_ts.tolist() == moments
    assert actual.user.tolist() == [e["user_pseudo_id"] for e in events]
    rows = spark.read.format("delta").load(str(ws.table("reported", "events"))).orderBy("_source_line").collect()
    for n, (row, e) in enumerate(zip(rows, events, strict=True)):
        assert row["items"] == [item["item_id"] for item in e["items"]]
        assert row["prices"] == [item.get("price") for item in e["items"]]
        assert row["first_item"] == (e["items"][0]["item_id"] if e["items"] else None)
        values = {p["key"]: p["value"] for p in e["event_params"] or ()}
        assert row["page"] == values.get("page_location", {}).get("string_value")
        assert row["session"] == (7 * 10**15 + n if "ga_session_id" in values else None)
    reasons = read_table(spark, ws, "quarantine")._reason
    assert [reason.split(":")[0] for reason in reasons] == ["items", "prices", "page"]


def test_microseconds_are_read_by_arrow_alike(spark: SparkSession, tmp_path: Path) -> None:
    columns = [{"name": "event_timestamp", "type": "timestamp"}, COLUMNS[1], COLUMNS[-1]]
    units = {"event_timestamp": "epoch_microseconds", "server_ts": "epoch_nanoseconds"}
    lines = [json.dumps(event(n)) for n in range(90)]
    lines += [
        '{"event_timestamp": "1767830400000000", "clicked": 1}',
        '{"event_timestamp": 1.7678304E15, "clicked": 1}',
    ]
    lines += ['{"event_timestamp": 1767830400000000000, "clicked": 1}', '{"server_ts": -1, "clicked": 1}']
    write(tmp_path, {f"in/{DS}.jsonl": "".join(f"{line}\n" for line in lines).encode()})
    source = {"format": "jsonl", "path": "in/{ds}.jsonl", "timestamps": units}
    ws = Workspace(tmp_path)
    manifest = ingest(pipeline(source, columns), ws, DS).manifest
    assert (manifest.rows["kept"], manifest.rows["quarantined"]) == (93, 1)
    actual = read_table(spark, ws)
    moments = [START + timedelta(microseconds=123_456_789 * n) for n in range(90)]
    assert actual.event_timestamp.tolist()[:92] == [*moments, START, START]
    assert actual.server_ts.tolist()[92] == datetime(1969, 12, 31, 23, 59, 59, 999999)
