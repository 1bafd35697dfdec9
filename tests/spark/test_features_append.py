"""`features.append`: three days in a row, against pandas and a full build; late events, kills, what is taken over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.features.build import run as build_run
from headrace.features.build.stage import BuildFeatures
from headrace.features.types import declared
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest, Output
from tests.spark.test_features_stage import META, clicks, dataset, expected_split, make_clicks, read, run

NUMBERS = ["user_age", "user_activity", "item_age_days", "item_price", "price", "unpriced", "clicked"]


def day_of(number: int) -> str:
    return f"2026-01-{number:02d}"


def land(spark: SparkSession, ws: Workspace, spec: Spec, events: pd.DataFrame, ds: str) -> None:
    """Leave what ingest leaves of one more day: files beside those of earlier days, which stay as they are."""
    types = {c.name: declared(c).arrow for c in spec.table.columns}
    types |= {"_source_file": pa.string(), "_source_line": pa.int64(), "ds": pa.string()}
    table = pa.table({n: pa.array(list(events[n]), t) for n, t in types.items()})
    ddl = ", ".join([*(f"`{c.name}` {c.type}" for c in spec.table.columns), *META])
    path = ws.table(spec.pipeline, "events").local_path()
    frame = spark.createDataFrame(table, ddl).repartition(2)
    frame.write.format("delta").mode("append").partitionBy("ds").save(str(path))
    version = max(int(p.stem) for p in (path / "_delta_log").glob("*.json"))
    Manifest(
        stage="ingest",
        pipeline=spec.pipeline,
        ds=ds,
        key=f"ingest-{version}",
        spec_hash="test",
        outputs=(Output(kind="delta", name=f"lake/{spec.pipeline}/events", version=str(version), rows=len(events)),),
    ).save(ws.manifest(spec.pipeline, ds, "ingest"))


def inodes(folder: Path, day: str) -> dict[str, int]:
    """Return the inode numbers of a day's files, wherever they are."""
    files = sorted(folder.glob(f"*/day-{day}-*.parquet"))
    assert files, day
    return {p.name: p.stat().st_ino for p in files}


def all_rows(folder: Path) -> pd.DataFrame:
    """All rows, with their split, by event_id."""
    parts = [read(folder, split).assign(split=split) for split in ("train", "valid")]
    return pd.concat(parts).set_index("event_id").sort_index()


def assert_rows(actual: pd.DataFrame, expected: pd.DataFrame, columns: list[str]) -> None:
    assert actual.index.tolist() == expected.index.tolist()
    for column in columns:
        if expected[column].dtype == np.float32:
            np.testing.assert_allclose(actual[column], expected[column], rtol=2e-6, atol=2e-6, err_msg=column)
        else:
            assert actual[column].tolist() == expected[column].tolist(), column


def test_days_are_appended(spark: SparkSession, ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows that `prepare` drops are nowhere, not even in what a day's files were made of: some land a day late.
    prepare = [{"filter": {"where": "device <> 'bot'"}}, {"dropna": {"subset": ["event_id"]}}]
    spec, plain = clicks(append=True, prepare=prepare), clicks(prepare=prepare)
    events, bots = make_clicks(1600, days=7), make_clicks(300, days=7, seed=1).assign(device="bot")
    day = np.array([t.day for t in events["ts"]])
    landing = np.array([t.strftime("%Y-%m-%d") for t in events["ts"]], dtype=object)
    late = np.flatnonzero((day == 4) & (np.arange(len(day)) % 10 == 0))
    landing[late] = day_of(7)  # some events of the 4th land on the 7th
    events["ds"] = landing
    rest = [c for c in expected_split(events[:50], events[:50]).columns if c not in (*NUMBERS, "event_id")]

    def landed(number: int) -> pd.DataFrame:
        return events[landing <= day_of(number)]

    def of_days(first: int, last: int, seen: int) -> pd.DataFrame:
        landed_rows = landed(seen)
        return landed_rows[[first <= t.day <= last for t in landed_rows["ts"]]]

    def expected(rows: pd.DataFrame, train: pd.DataFrame) -> pd.DataFrame:
        return expected_split(rows, train).set_index("event_id").sort_index()

    def put(number: int, into: Workspace) -> None:
        parts = [events[landing == day_of(number)], bots[bots["ds"] == day_of(number)]]
        land(spark, into, spec, pd.concat(parts), day_of(number))

    def put_first(into: Workspace, pipeline_spec: Spec) -> None:
        land(spark, into, pipeline_spec, pd.concat([landed(5), bots[bots["ds"] <= day_of(5)]]), day_of(5))

    # The first day writes everything: a full build, but for the names of its files.
    put_first(ws, spec)
    first = run(spec, ws, day_of(5)).manifest
    base, learned_from = dataset(ws, first), of_days(2, 4, 5)
    assert first.facts["append"] == {
        "version": 2,
        "learned": day_of(5),
        "kept": [],
        "written": [day_of(d) for d in (2, 3, 4, 5)],
    }
    assert_rows(all_rows(base), expected(of_days(2, 5, 5), learned_from), [*NUMBERS, *rest])
    for split in ("train", "valid"):
        assert first.facts["splits"][split]["row_groups"] >= 4

    # The next day is killed after it has linked. Nothing is to be seen of it, and the base is as it was.
    put(6, ws)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    files_before = {p: (p.stat().st_ino, p.read_bytes()) for p in sorted(base.rglob("*")) if p.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(build_run, "write_lake_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            run(spec, ws, day_of(6))
    assert not [p for p in base.parent.parent.glob("*/*") if p.parent.name == day_of(6)]
    # A real kill leaves the folder; the rerun has the same key, removes it, and the links with it.
    plan = BuildFeatures(count_day)
    key = run_key(plan, spec, ws, day_of(6))
    leftover = ws.dataset("clicks", day_of(6), key).local_path().parent / f".{key}.abc.partial" / "train"
    leftover.mkdir(parents=True)
    some = next(iter(sorted((base / "valid").glob("*.parquet"))))
    os.link(some, leftover / some.name)

    second = run(spec, ws, day_of(6)).manifest
    assert second.key == key
    assert not leftover.exists()
    assert {p: (p.stat().st_ino, p.read_bytes()) for p in sorted(base.rglob("*")) if p.is_file()} == files_before
    assert second.facts["append"]["kept"] == [day_of(d) for d in (3, 4, 5)]
    assert second.facts["append"]["written"] == [day_of(6)]
    folder = dataset(ws, second)
    for number in (3, 4, 5):
        assert inodes(folder, day_of(number)) == inodes(base, day_of(number))
    assert not list(folder.glob(f"*/day-{day_of(2)}-*"))  # it left the window
    assert [i.name for i in second.inputs if i.kind == "dataset"] == [first.output("dataset").name]

    # What the documentation says it equals. Days taken over: the base's fit, codes and numbers.
    actual = all_rows(folder)
    retained_rows, new = of_days(3, 5, 6), of_days(6, 6, 6)
    assert actual.loc[retained_rows["event_id"], "split"].eq("train").all()
    assert actual.loc[new["event_id"], "split"].eq("valid").all()
    assert len(actual) == len(retained_rows) + len(new) == sum(second.rows.values())
    assert_rows(actual.loc[sorted(retained_rows["event_id"])], expected(retained_rows, learned_from), [*NUMBERS, *rest])
    # The new day: numbers by the base's fit, codes as a full build of the same days gives them.
    new_rows = actual.loc[sorted(new["event_id"])]
    assert_rows(new_rows, expected(new, learned_from), NUMBERS)
    second_ws = Workspace(tmp_path / "other")
    put_first(second_ws, plain)
    run(plain, second_ws, day_of(5))
    put(6, second_ws)
    full = run(plain, second_ws, day_of(6)).manifest
    assert_rows(new_rows, all_rows(dataset(second_ws, full)).loc[new_rows.index], rest)
    assert full.dataset_schema == second.dataset_schema
    assert full.rows == second.rows
    for split in full.rows:
        assert full.facts["splits"][split]["rows"] == second.facts["splits"][split]["rows"]
    missing = [[c["missing_rate"] for c in m.facts["columns"]] for m in (full, second)]
    assert missing[0] == missing[1]
    assert run(spec, ws, day_of(6)).skipped

    # Late events of the 4th: its files are written anew, no other day's.
    put(7, ws)
    third = run(spec, ws, day_of(7)).manifest
    latest = dataset(ws, third)
    assert third.facts["append"] == {
        "version": 2,
        "learned": day_of(5),
        "kept": [day_of(5), day_of(6)],
        "written": [day_of(4), day_of(7)],
    }
    for number in (5, 6):
        assert inodes(latest, day_of(number)) == inodes(folder, day_of(number))
    assert not set(inodes(latest, day_of(4)).values()) & set(inodes(folder, day_of(4)).values())
    actual = all_rows(latest)
    assert sorted(actual.index) == sorted(of_days(4, 7, 7)["event_id"])
    assert set(events["event_id"].iloc[late]) <= set(actual.index)
    assert_rows(actual, expected(of_days(4, 7, 7), learned_from), NUMBERS)

    # A base that is damaged is not built upon.
    victim = next(iter(sorted((folder / "train").glob("*.parquet"))))
    victim.unlink()
    ws.manifest("clicks", day_of(7), "features").local_path().unlink()
    rerun = run(spec, ws, day_of(7)).manifest
    assert rerun.facts["append"]["kept"] == []
    assert rerun.facts["append"]["learned"] == day_of(7)
    assert rerun.key == third.key


def test_a_day_goes_from_test_to_valid_to_train(spark: SparkSession, ws: Workspace) -> None:
    spec = clicks(append=True, window_days=2, split={"by": "time", "valid_days": 1, "test_days": 1})
    events = make_clicks(900, days=6)
    events["ds"] = [t.strftime("%Y-%m-%d") for t in events["ts"]]
    land(spark, ws, spec, events[events["ds"] <= day_of(5)], day_of(5))
    first = run(spec, ws, day_of(5)).manifest
    land(spark, ws, spec, events[events["ds"] == day_of(6)], day_of(6))
    second = run(spec, ws, day_of(6)).manifest
    assert second.facts["append"]["kept"] == [day_of(d) for d in (3, 4, 5)]
    for manifest, last in ((first, 5), (second, 6)):
        for split, days in (("train", (last - 3, last - 2)), ("valid", (last - 1,)), ("test", (last,))):
            expected_rows = events[events["ds"].isin([day_of(d) for d in days])]
            assert sorted(read(dataset(ws, manifest), split)["event_id"]) == sorted(expected_rows["event_id"])


def run_key(built: BuildFeatures, spec: Spec, ws: Workspace, ds: str) -> str:
    """The key that a run of the day has."""
    seen: list[str] = []

    class Look(BuildFeatures):
        def run(self, ctx: Any) -> Any:
            seen.append(ctx.key)
            raise KeyboardInterrupt

    assert built.name == Look.name
    with pytest.raises(KeyboardInterrupt):
        run_stage(Look(), spec, ws, ds)
    return seen[0]
