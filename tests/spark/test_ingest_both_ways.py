"""Whole days of landing files by Arrow and by the judge of lines alone: the same tables, quarantine and manifest."""

from __future__ import annotations

import bz2
import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.lake.landing import arrow_rows, compression, write_rows
from tests.ingest_lines import NAMES, TABLE, csv_lines, json_lines
from tests.ingest_support import D1, D2, put, run

COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".zst": lambda body: pa.compress(body, "zstd", asbytes=True),
    ".bz2": bz2.compress,
}
COMPLETE_LINE = (
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
    frame = spark.read.format("delta").load(str(ws.table("shop", table)))
    rows = sorted(frame.collect(), key=lambda r: (r["ds"], r["_source_file"], r["_source_line"]))
    return [without_ending(repr({name: r[name] for name in sorted(frame.columns)})) for r in rows]


def without_ending(text: str) -> str:
    return text.replace(".zst", "").replace(".bz2", "")


def loaded(spark: SparkSession, ws: Workspace, days: dict[str, dict[str, bytes]], ending: str) -> list[Any]:
    """Load files, and return both tables and the manifest, or the refusal."""
    for ds, files in days.items():
        for name, body in files.items():
            put(ws, f"in/{ds}/{name}{ending}", COMPRESS[ending](body))
    manifest = run(spec(), ws, D2).manifest
    text = without_ending(json.dumps([manifest.rows, manifest.facts], ensure_ascii=False))
    return [rows_of(spark, ws, "events"), rows_of(spark, ws, "quarantine"), json.loads(text)]


def test_both_ways_commit_the_same(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a bzip2 file of one block is read by many tasks: one has lines, the others none.
    monkeypatch.setattr(arrow_rows, "LEAST_BYTES", 0)
    monkeypatch.setattr(compression, "LEAST_BYTES", 500)
    # So that hashes of keys are compared range by range.
    monkeypatch.setattr(arrow_rows, "_HASHES_AT_ONCE", 16)
    numbers, row_count = count(), 0
    lines = st.lists(st.one_of(st.just(COMPLETE_LINE), json_lines()), min_size=30, max_size=80)
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
        nonlocal row_count
        # Odd names of undeclared columns are refused both ways: test_ingest_refused.
        header = ",".join([*NAMES[:5], "z", *NAMES[6:]])
        days = {
            # A row that is whole, and so every column is there.
            D1: {"a.jsonl": "\n".join([COMPLETE_LINE, *first]).encode() + b'\n{"id": "\xff"}'},
            D2: {
                "a.json": "\n".join([*second, *first[:10]]).encode(),
                "b.csv": end.join([header, PLAIN, *fields]).encode(),
            },
        }
        home = tmp_path / str(next(numbers))
        by_arrow = loaded(spark, Workspace(home / "arrow"), days, "")
        in_ranges = loaded(spark, Workspace(home / "bzip2"), days, ".bz2")
        with monkeypatch.context() as all_judged:
            all_judged.setattr(write_rows, "reader_of_lines", lambda form, declaration, accept: write_rows._NoReader())
            judged = loaded(spark, Workspace(home / "judged"), days, ".zst")
        assert by_arrow == judged
        assert in_ranges == judged
        assert by_arrow[1]
        row_count += len(by_arrow[0])

    check()
    assert row_count
