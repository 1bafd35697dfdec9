"""Whole days of landing files by Arrow and by Spark alone: the same tables, quarantine and manifest."""

from __future__ import annotations

import bz2
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.workspace import Workspace
from tests.ingest_lines import NAMES, TABLE, csv_lines, json_lines
from tests.ingest_support import D1, D2, put, run

#: Spark alone reads files that are compressed so.
ENDING = ".bz2"
WHOLE = (
    '{"id": "e1", "ts": "2026-03-01T05:06:07Z", "at": 1772323200000, "i": 3, "b": -4, "f": 1.5, "d": 0.1, "ok": true, '
    '"day": "2026-03-01", "tags": ["a", null], "sizes": [1], "weights": [0.5]}'
)
PLAIN = "e2,2026-03-01T05:06:07Z,1772323200000,3,-4,1.5,0.1,true,2026-03-01,a|b,1|2,0.5"


def spec() -> Spec:
    table = TABLE | {"new_columns": "accept", "expectations": {**TABLE["expectations"], "max_bad_rate": 1}}
    source = {"format": "clicks", "path": "in/{ds}/*", "timestamps": {"at": "epoch_milliseconds"}}
    features = {"label": "ok", "workflow": [], "split": {"by": "position"}}
    return build_spec({"pipeline": "shop", "source": source, "table": table, "features": features})


def rows_of(spark: SparkSession, ws: Workspace, table: str) -> list[str]:
    """Rows as text, floats by their bits; in the order of the source."""
    found = spark.read.format("delta").load(str(ws.table("shop", table)))
    rows = sorted(found.collect(), key=lambda r: (r["ds"], r["_source_file"], r["_source_line"]))
    return [repr({name: r[name] for name in sorted(found.columns)}).replace(ENDING, "") for r in rows]


def loaded(spark: SparkSession, ws: Workspace, days: dict[str, dict[str, bytes]], compress: bool) -> list[Any]:
    """What becomes of the files: both tables and the manifest, or the refusal."""
    for ds, files in days.items():
        for name, body in files.items():
            put(ws, f"in/{ds}/{name}{ENDING if compress else ''}", bz2.compress(body) if compress else body)
    manifest = run(spec(), ws, D2).manifest
    said = json.dumps([manifest.rows, manifest.facts], ensure_ascii=False).replace(ENDING, "")
    return [rows_of(spark, ws, "events"), rows_of(spark, ws, "quarantine"), json.loads(said)]


def test_both_ways_commit_the_same(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers, kept = count(), 0
    lines = st.lists(st.one_of(st.just(WHOLE), json_lines()), min_size=30, max_size=80)
    records = st.lists(st.one_of(st.just(PLAIN), csv_lines()), min_size=30, max_size=80)

    # Each example is four loads of Spark's.
    @settings(
        max_examples=3,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(lines, lines, records, st.sampled_from(["\n", "\r\n"]))
    def check(first: list[str], second: list[str], fields: list[str], end: str) -> None:
        nonlocal kept
        # Odd names of undeclared columns are refused both ways: test_ingest_refused.
        header = ",".join([*NAMES[:5], "z", *NAMES[6:]])
        days = {
            # A row that is whole, and so every column is there.
            D1: {"a.jsonl": "\n".join([WHOLE, *first]).encode() + b'\n{"id": "\xff"}'},
            D2: {
                "a.json": "\n".join([*second, *first[:10]]).encode(),
                "b.csv": end.join([header, PLAIN, *fields]).encode(),
            },
        }
        home = tmp_path / str(next(numbers))
        by_arrow = loaded(spark, Workspace(home / "arrow"), days, compress=False)
        assert "Spark alone reads" not in caplog.text
        by_spark = loaded(spark, Workspace(home / "spark"), days, compress=True)
        assert f"compressed as {ENDING}" in caplog.text
        caplog.clear()
        assert by_arrow == by_spark
        assert by_arrow[1]
        kept += len(by_arrow[0])

    with caplog.at_level("INFO", "headrace.lake"):
        check()
    assert kept
