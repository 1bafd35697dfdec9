"""Integers of which some are missing, as pandas writes them: 100054.0; of 17 digits, too."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
COLUMNS = [
    {"name": "user_id", "type": "bigint"},
    {"name": "item_id", "type": "int"},
    {"name": "clicked", "type": "tinyint"},
]


@pytest.mark.parametrize("ending", [".csv", ".csv.zst", ".jsonl", ".jsonl.zst"])
def test_whole_floats_are_integers(spark: SparkSession, tmp_path: Path, ending: str) -> None:
    large = 10**16 + 1 if ending.startswith(".csv") else 2**53 - 400
    users = [None if n % 31 == 0 else large + 2 * n if n % 2 else 100_000 + n for n in range(150)]
    texts = ["" if u is None else f"{u}.0" for u in users]
    clicks = [(text, f"{n * 100}E2" if n % 5 == 0 else f"{n}.0", n % 2) for n, text in enumerate(texts)]
    if ending.startswith(".csv"):
        lines = [
            "user_id,item_id,clicked",
            *(f"{u},{i},{c}.00" for u, i, c in clicks),
            "1.5,2,0",
            "1,2.5E0,0",
            "1,3E10,0",
        ]
    else:
        lines = [f'{{"user_id": {u or "null"}, "item_id": {i}, "clicked": {c}}}' for u, i, c in clicks]
        # A number that a double rounds is refused.
        bad = (("9007199254740993.0", 2), (1, 2.5), (1, "3E10"))
        lines += [f'{{"user_id": {u}, "item_id": {i}, "clicked": 0}}' for u, i in bad]
    body = ("\n".join(lines) + "\n").encode()
    write(tmp_path, {f"in/{DS}{ending}": pa.compress(body, "zstd", asbytes=True) if "zst" in ending else body})
    source = {"format": "csv" if "csv" in ending else "jsonl", "path": f"in/{{ds}}{ending}"}
    ws = Workspace(tmp_path)
    manifest = ingest(pipeline(source, COLUMNS), ws, DS).manifest
    assert (manifest.rows["kept"], manifest.rows["quarantined"]) == (150, 3)
    rows = spark.read.format("delta").load(str(ws.table("reported", "events"))).orderBy("_source_line").collect()
    assert [row.user_id for row in rows] == users
    assert [row.item_id for row in rows] == [n * 10_000 if n % 5 == 0 else n for n in range(150)]
    reasons = read_table(spark, ws, "quarantine")._reason
    assert [reason.split(":")[0] for reason in reasons] == ["user_id", "item_id", "item_id"]
