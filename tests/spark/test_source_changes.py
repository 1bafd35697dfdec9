"""Days by a Delta table's change data feed, against Spark's own reading of the feed and of versions."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.tables.change_feed import COPY, ROW, live_rows
from headrace.stage.manifest import Manifest
from tests.source_table_support import D1, D2, D3, D4, DDL, dataset, expected, frame, ids, ingest, make_rows, make_spec


def put_times(table: Path, days: Mapping[int, str]) -> None:
    """Set the times of the commits: from these versions on at noon of a day."""
    day = ""
    for version, file in enumerate(sorted((table / "_delta_log").glob("*.json"))):
        day = days.get(version, day)
        timestamp = datetime.fromisoformat(f"{day}T12:00:00+00:00").timestamp() + version
        os.utime(file, (timestamp, timestamp))


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of commits, with deletion vectors and names of columns that are mapped."""
    path = tmp_path_factory.mktemp("feed") / "events"
    features = "'delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name'"
    spark.sql(
        f"CREATE TABLE delta.`{path}` ({DDL}) USING delta TBLPROPERTIES "
        f"('delta.enableChangeDataFeed' = 'true', {features})"
    )
    rows = make_rows()

    def add(batch: pd.DataFrame) -> None:
        frame(spark, batch).coalesce(1).write.format("delta").mode("append").save(str(path))

    add(rows[rows["id"] % 3 == 0])  # 1: D1
    add(rows[rows["id"] % 3 == 1])  # 2: D2
    spark.sql(f"UPDATE delta.`{path}` SET price = price + 100 WHERE id IN (3, 12, 4)")  # 3
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id IN (6, 10)")  # 4
    add(rows[rows["id"] % 3 == 2])  # 5: D3
    spark.sql(f"OPTIMIZE delta.`{path}`")  # 6
    # 15 is of D1: too late for D3 then.
    spark.sql(f"UPDATE delta.`{path}` SET price = price + 100 WHERE id IN (7, 4, 15)")  # 7
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id IN (18, 7, 5)")  # 8
    put_times(path, {0: D1, 2: D2, 5: D3})
    return path


def spec_of(table: Path, **source: Any) -> Spec:
    workflow = [{"columns": ["price"], "ops": []}, {"columns": ["user", "item"], "ops": ["categorify"]}]
    return make_spec(
        {"format": "delta", "path": str(table), "day": {"changes": True}, **source}, {}, {"workflow": workflow}
    )


def at_version(spark: SparkSession, table: Path, version: int) -> pd.DataFrame:
    """Spark's own reading of a version."""
    frame = spark.read.format("delta").option("versionAsOf", version).load(str(table)).toPandas()
    return frame.assign(ts=frame["ts"].dt.tz_localize("UTC"))


def prices(frames: Mapping[str, pd.DataFrame]) -> dict[int, float]:
    every = pd.concat(frames.values())
    return {int(i): float(p) for i, p in zip(every["id"], every["price"], strict=True)}


def prices_of(rows: pd.DataFrame, frames: Mapping[str, pd.DataFrame]) -> dict[int, float]:
    """The same, of those of the rows that a dataset has."""
    rows = rows[rows["id"].isin(pd.concat(frames.values())["id"])]
    return dict(zip(rows["id"], rows["price"], strict=True))


def versions(manifest: Manifest) -> dict[str, str]:
    return {ds: text for ds, (text, _) in manifest.facts["table"]["days"].items()}


def test_days_are_what_the_feed_has_of_them(spark: SparkSession, ws: Workspace, table: Path) -> None:
    spec = spec_of(table)
    first = ingest(spec, ws, D1)
    assert versions(first) == {D1: "..1"}
    assert first.outputs[0].version == "1"
    assert first.rows == {"read": 100, "kept": 100, "quarantined": 0, "duplicates": 0}
    # D2 is taken with D3.
    manifest = ingest(spec, ws, D3)
    assert versions(manifest) == {D1: "..1", D2: "2..4", D3: "5..8"}
    assert (manifest.facts["days"], manifest.outputs[0].version) == ([D2, D3], "8")
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 2).load(str(table))
    counted: dict[str, Counter[str]] = {D2: Counter(), D3: Counter()}
    for row in feed.groupBy(F.to_date("_commit_timestamp").alias("day"), "_change_type").count().collect():
        counted[str(row["day"])][row["_change_type"]] += row["count"]
    rows = make_rows()
    is_earlier = {ds: rows["ts"] < pd.Timestamp(ds, tz="UTC") for ds in (D2, D3)}
    late = {ds: int(((rows["id"] % 3 == k) & is_earlier[ds]).sum()) for k, ds in ((1, D2), (2, D3))}
    assert manifest.facts["changed_days"] == [
        {"ds": ds, "late": late[ds], "updated": n["update_postimage"], "deleted": n["delete"]}
        for ds, n in counted.items()
    ]
    assert manifest.facts["changed_days"][1] == {"ds": D3, "late": 10, "updated": 3, "deleted": 3}
    # What a day brought and is still there at its end; 15 is more than one day late.
    live = {D2: counted[D2]["insert"] + 3 - 2, D3: counted[D3]["insert"] + 3 - 2}
    assert manifest.rows["read"] == live[D2] + live[D3]
    assert manifest.facts["reasons"] == {"ts: more than 1 day late": 1}

    frames = dataset(spec, ws, D3)
    current = at_version(spark, table, 8)
    current = current[current["id"] != 15]
    assert ids(frames) == expected(current)
    assert prices(frames) == prices_of(current, frames)
    # The day before, as it was then, though later ones were taken since.
    middle = dataset_of(spec, ws, D2)
    older = at_version(spark, table, 4)
    assert ids(middle) == expected(older, D2)
    assert prices(middle) == prices_of(older, middle)
    # A rerun reads the same versions, whatever was committed since, and at whatever time.
    assert ingest(spec, ws, D1).started == first.started
    day_by_day = Workspace(ws.home / "day-by-day")
    for ds in (D1, D2, D3):
        rerun = ingest(spec, day_by_day, ds)
        if ds != D1:
            ingest(spec, ws, ds)
    assert versions(rerun) == versions(manifest)
    for split, rows_of in dataset(spec, day_by_day, D3).items():
        pd.testing.assert_frame_equal(rows_of, frames[split])
    for split, rows_of in dataset_of(spec, day_by_day, D2).items():
        pd.testing.assert_frame_equal(rows_of, middle[split])


def dataset_of(spec: Spec, ws: Workspace, ds: str) -> dict[str, pd.DataFrame]:
    ingest(spec, ws, ds)
    return dataset(spec, ws, ds)


def test_changes_that_are_ignored_or_refused(spark: SparkSession, ws: Workspace, table: Path) -> None:
    spec = spec_of(table, changed_days={"updates": "ignore", "deletes": "ignore"})
    for ds in (D1, D3):
        manifest = ingest(spec, ws, ds)
    assert manifest.rows == {"read": 200, "kept": 200, "quarantined": 0, "duplicates": 0}
    frames, rows = dataset(spec, ws, D3), make_rows()
    assert ids(frames) == expected(rows)
    assert prices(frames) == prices_of(rows, frames)
    # 7 was updated before it was deleted: its key tells which row that is.
    copy_ws = Workspace(ws.home / "kept")
    spec = spec_of(table, changed_days={"updates": "ignore"})
    for ds in (D1, D3):
        ingest(spec, copy_ws, ds)
    remaining = rows[~rows["id"].isin([5, 6, 7, 10, 18])]
    frames = dataset(spec, copy_ws, D3)
    assert (ids(frames), prices(frames)) == (expected(remaining), prices_of(remaining, frames))
    nameless = spec.model_copy(update={"table": spec.table.model_copy(update={"keys": ()})})
    with pytest.raises(UserError, match=r"told apart by their keys: declare table\.keys"):
        ingest(nameless, Workspace(ws.home / "nameless"), D1)
    strict = Workspace(ws.home / "strict")
    spec = spec_of(table, changed_days={"updates": "refuse"})
    ingest(spec, strict, D1)
    with pytest.raises(UserError, match=f"{D2}: 3 updated. Nothing was taken anew; source.changed_days"):
        ingest(spec, strict, D3)


def test_what_is_no_feed(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rows = frame(spark, make_rows(9, day=D1)).coalesce(1)
    rows.write.format("delta").option("delta.enableChangeDataFeed", "false").save(str(path))
    put_times(path, {0: D1})
    spec = spec_of(path)
    with pytest.raises(UserError, match=r"has no change data feed\. Turn it on"):
        ingest(spec, ws, D1)
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')")  # 1
    spark.sql(f"UPDATE delta.`{path}` SET click = 0 WHERE id = 1")  # 2
    frame(spark, make_rows(9, 100, D2)).write.format("delta").mode("append").save(str(path))  # 3
    put_times(path, {0: D1, 2: D2})
    assert versions(ingest(spec, ws, D1)) == {D1: "..1"}
    assert ingest(spec, ws, D2).rows["read"] == 10
    # Days before the first, between days that were taken, and without commits.
    for ds, message in (
        ("2026-02-28", f"its days begin with {D1}"),
        (D4, "no version after 3 was committed before the end of that day"),
    ):
        with pytest.raises(UserError, match=message):
            ingest(spec, ws, ds)
    # Files that VACUUM has removed.
    changed = next((path / "_change_data").glob("*.parquet"))
    moved = changed.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="is gone: VACUUM has removed it"):
        dataset(spec, ws, D2)
    moved.rename(changed)
    assert ids(dataset(spec, ws, D2)) == {"train": list(range(9)), "valid": list(range(100, 109))}
    # A stretch without a feed, and a column that has another name since.
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'false')")  # 4
    put_times(path, {0: D1, 2: D2, 4: D3})
    with pytest.raises(UserError, match="has no change data feed of version 4"):
        ingest(spec, ws, D3)
    by_time = make_spec({"format": "delta", "path": str(path), "day": {"time": "ts"}})
    other_ws = Workspace(ws.home / "other")
    ingest(by_time, other_ws, D1)
    with pytest.raises(UserError, match="were taken by a partition or a time column before"):
        ingest(spec, other_ws, D2)
    with pytest.raises(UserError, match=r"ignore is of day\.changes"):
        make_spec({"format": "delta", "path": "x", "day": {"time": "ts"}, "changed_days": {"deletes": "ignore"}})


def test_columns_that_change(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """A new one is null before; one that goes is refused."""
    path = tmp_path / "events"
    properties = "'delta.enableChangeDataFeed' = 'true', 'delta.columnMapping.mode' = 'id'"
    spark.sql(f"CREATE TABLE delta.`{path}` ({DDL}) USING delta TBLPROPERTIES ({properties})")
    frame(spark, make_rows(9, day=D1)).write.format("delta").mode("append").save(str(path))  # 1
    spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMN tags map<string, int>")  # 2
    more = frame(spark, make_rows(9, 100, D2)).selectExpr("*", "map('a', CAST(id AS int)) AS tags")
    more.write.format("delta").mode("append").save(str(path))  # 3
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id IN (1, 101)")  # 4
    put_times(path, {0: D1, 2: D2})
    spec = spec_of(path)
    ingest(spec, ws, D1)
    assert ingest(spec, ws, D2).facts["changed_days"] == [{"ds": D2, "late": 0, "updated": 0, "deleted": 2}]
    event_ids = ids(dataset(spec, ws, D2))
    assert sorted(event_ids["train"] + event_ids["valid"]) == [0, *range(2, 9), 100, *range(102, 109)]
    spark.sql(f"ALTER TABLE delta.`{path}` RENAME COLUMN tags TO marks")  # 5
    frame(spark, make_rows(1, 200, D3)).write.format("delta").mode("append").save(str(path))  # 6
    put_times(path, {0: D1, 2: D2, 5: D3})
    with pytest.raises(
        UserError, match=r"column 'tags' of .* was renamed, dropped or given another type after version"
    ):
        ingest(spec, ws, D3)


def test_live_rows_are_those_of_a_stack(spark: SparkSession) -> None:
    """Against a simulation: of any changes, seen from any version on."""
    random = np.random.default_rng(11)
    values: list[tuple[str | None, str | None]] = [("a", None), (None, "a"), ("a", "a"), (None, None), ("b", None)]
    stacks: dict[Any, list[int]] = {v: [] for v in values}
    changes, feeds = [], {}
    for version in range(40):
        for value in values:
            removed = int(random.integers(0, len(stacks[value]) + 1)) if random.random() < 0.5 else 0
            added = int(random.integers(0, 3))
            kinds = ["delete" if random.random() < 0.5 else "update_preimage" for _ in range(removed)]
            kinds += ["insert" if random.random() < 0.5 else "update_postimage" for _ in range(added)]
            changes += [(*value, kind, version) for kind in kinds]
            stacks[value] = stacks[value][: len(stacks[value]) - removed] + [version] * added
    random.shuffle(changes)
    feed = spark.createDataFrame(changes, "x string, y string, _change_type string, _commit_version bigint")
    schema = feed.select("x", "y").schema
    feeds = {first: feed.where(F.col("_commit_version") >= first) for first in (0, 17, 35)}
    for first, seen in feeds.items():
        live = live_rows(seen, schema, None, updates="accept", deletes="refuse").collect()
        actual = Counter(((r["x"], r["y"]), r["_commit_version"]) for r in live)
        assert actual == Counter((v, commit) for v, stack in stacks.items() for commit in stack if commit >= first)
        assert len({(r["_commit_version"], r[COPY], r[ROW]) for r in live}) == len(live)
    everything = live_rows(feed, schema, None, updates="ignore", deletes="ignore")
    assert everything.count() == sum(json.dumps(c).count('"insert"') for c in changes)
