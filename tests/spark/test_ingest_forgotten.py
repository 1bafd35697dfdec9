"""Rows of forgotten values: erased, and never loaded again, by Arrow, by Spark's rules, of tables that are read in
place.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.forget.erase import forget
from headrace.jobs.housekeeping.forget.persons import Persons
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.with_spark import read_version
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.load_history import LoadHistory
from tests import source_table_support as table_support
from tests.ingest_support import D1, D2, D3, D4, event, ids, jsonl, make_spec, put, run, table

NOW = datetime(2026, 3, 9, tzinfo=UTC)
USERS = [2**53 + n for n in (3, 7)]
FORGOTTEN = Persons("user", True, frozenset(map(str, USERS)))


def files(ds: str, start: int) -> list[dict[str, Any] | str]:
    """Good rows, a bad one of each of two users, a line that is no JSON with one of them."""
    good: list[dict[str, Any] | str] = [event(start + n % 100, ds, user=2**53 + n % 10) for n in range(40)]
    bad = [event(start + 90 + n, ds, user=2**53 + n, hour=99) for n in (3, 4)]
    return [*good, *bad, f'{{"user": {USERS[1]}, broken']


@pytest.mark.parametrize("ending", ["", ".zst"], ids=["arrow", "spark"])
def test_landing_files(spark: SparkSession, tmp_path: Path, ending: str) -> None:
    spec, ws = make_spec(), Workspace(tmp_path / "home")

    def deliver(ds: str, start: int, name: str = "a.jsonl") -> None:
        body = jsonl(files(ds, start))
        put(ws, f"in/{ds}/{name}{ending}", pa.compress(body, "zstd", asbytes=True) if ending else body)

    deliver(D1, 0)
    first = run(spec, ws, D1).manifest
    version = int(first.output("delta").version)
    tables_before = {name: table(spark, ws, name) for name in ("events", "quarantine")}
    assert (len(tables_before["events"]), len(tables_before["quarantine"])) == (40, 3)
    *_, (request, _) = forget(spec, ws, FORGOTTEN, NOW)
    assert request.finished  # type: ignore[union-attr]
    remaining = {
        "events": [r for r in tables_before["events"] if r["user"] not in USERS],
        "quarantine": [r for r in tables_before["quarantine"] if not any(str(u) in r["_raw"] for u in USERS)],
    }
    assert (len(remaining["events"]), len(remaining["quarantine"])) == (32, 1)
    for name, rows in remaining.items():
        assert table(spark, ws, name) == rows
    # Older versions are read without them, by Spark too.
    old = read_version(spark, ws.table("shop", "events"), version, lambda _: True)
    assert sorted(r["id"] for r in old.collect()) == sorted(r["id"] for r in remaining["events"])
    # The day stands, and the next one has none of them.
    rerun = run(spec, ws, D1)
    assert (rerun.skipped, rerun.manifest) == (True, first)
    deliver(D2, 100)
    second = run(spec, ws, D2).manifest
    expected = {"read": 43, "kept": 32, "quarantined": 1, "duplicates": 0, "forgotten": 10}
    assert second.rows == expected
    assert {r["user"] for r in table(spark, ws, "events")}.isdisjoint(USERS)
    # Nor has a day that is loaded again from the same files and another one.
    put(ws, f"in/{D1}/b.jsonl", jsonl([event(60, D1), event(61, D1, user=USERS[0])]))
    run(spec, ws, D1)
    records = LoadHistory(DeltaLog(ws.table("shop", "events"))).records
    assert records[D1].rows == expected | {"read": 45, "kept": 33, "forgotten": 11}
    assert records[D2].rows == expected
    assert len(ids(ws)[D1]) == 33
    for name in remaining:
        assert not any(str(u) in str(r) for u in USERS for r in table(spark, ws, name))
    assert len([r for r in table(spark, ws, "quarantine") if r["ds"] == D1]) == 1


def test_lines_are_recognised_by_the_words_of_a_value(spark: SparkSession) -> None:
    """A line that is no row matches all words of a value in order, whatever stands between; never some of them."""
    listed = ForgottenValues.new().having("note", ["Ann B. Lee", "x|y", "(z)", "w", "::"])
    lines = {
        '{"note": "Ann B. Lee", broken': True,
        "Ann,B.;Lee": True,
        "Ann Lee B.": False,
        "Ann B.": False,
        "a|x|y|b": True,
        "y|x": False,
        "z,": True,
        "zz": False,
        "a w": True,
        "aw": False,
        "": False,
        "::": False,
    }
    frame = spark.createDataFrame([(text,) for text in [*lines, None]], "line string").coalesce(1)
    matched = [row[0] for row in frame.select(listed.spark_line("note", F.col("line"))).collect()]
    assert matched == [*lines.values(), False]


def test_a_table_that_is_read_in_place(spark: SparkSession, tmp_path: Path) -> None:
    """The table is the user's: its rows are left out, not removed."""
    ws, folder = Workspace(tmp_path / "home"), tmp_path / "theirs"
    rows = table_support.make_rows()
    pq.write_to_dataset(table_support.arrow_rows(rows), folder, partition_cols=["dt"])
    spec = table_support.make_spec({"format": "parquet", "path": str(folder), "day": {"partition": "dt"}})
    for ds in (D1, D2, D3):
        table_support.ingest(spec, ws, ds)
    all_ids = table_support.ids(table_support.dataset(spec, ws, D3))
    forgotten = Persons("user", False, frozenset(["u3", "u11"]))
    places = [p for p in forget(spec, ws, forgotten, NOW) if not isinstance(p, tuple)]
    assert [p.name for p in places if p.kind == "source"] == [f"parquet {folder}"]
    remaining_ids = table_support.ids(table_support.dataset(spec, ws, D3))
    forgotten_ids = set(rows["id"][rows["user"].isin(["u3", "u11"])])
    assert remaining_ids == {
        split: [i for i in split_ids if i not in forgotten_ids] for split, split_ids in all_ids.items()
    }
    assert sum(map(len, remaining_ids.values())) < sum(map(len, all_ids.values()))
    # A day that is taken after it counts them.
    pq.write_to_dataset(table_support.arrow_rows(table_support.make_rows(30, 900, D4)), folder, partition_cols=["dt"])
    counts = table_support.ingest(spec, ws, D4).rows
    users = table_support.make_rows(30, 900, D4)["user"]
    assert (counts["read"], counts["forgotten"]) == (30, int(users.isin(["u3", "u11"]).sum()))
    assert counts["forgotten"] > 0
    assert pq.read_table(folder).num_rows == 330


def test_the_next_day_brings_nobody_back(spark: SparkSession, tmp_path: Path) -> None:
    """Persons who are delivered again get no code, and are in no row of a dataset; all others' codes and rows are
    there.
    """
    spec, ws = table_support.make_spec({"format": "jsonl", "path": "in/{ds}/*"}), Workspace(tmp_path / "home")
    delivered = {ds: table_support.make_rows(90, 1000 * n, ds) for n, ds in enumerate((D2, D3, D4))}

    def deliver(ds: str) -> None:
        body = delivered[ds].drop(columns="dt").to_json(orient="records", lines=True, date_format="iso")
        put(ws, f"in/{ds}/a.jsonl", body.encode())
        table_support.ingest(spec, ws, ds)

    def codes() -> dict[str, int]:
        entries = spark.read.format("delta").load(str(ws.table("shop", "vocabulary"))).where("name = 'user'").collect()
        return {r["value"]: r["code"] for r in entries}

    for ds in (D2, D3):
        deliver(ds)
    table_support.dataset(spec, ws, D3)
    codes_before = codes()
    forgotten = {"u3", "u11"}
    assert forgotten < codes_before.keys()
    *_, (request, _) = forget(spec, ws, Persons("user", False, frozenset(forgotten)), NOW)
    assert request.finished  # type: ignore[union-attr]
    deliver(D4)
    frames = table_support.dataset(spec, ws, D4)
    after = codes()
    assert sorted(after.values()) == sorted(codes_before.values())
    assert {v: c for v, c in codes_before.items() if v not in forgotten}.items() <= after.items()
    assert forgotten.isdisjoint(after)
    rows = pd.concat(delivered.values())
    assert table_support.ids(frames) == table_support.expected(rows[~rows["user"].isin(forgotten)], D4)
    used = {code for frame in frames.values() for code in frame["user"]}
    assert used.isdisjoint({codes_before[user] for user in forgotten})
    assert len(used) > 10
