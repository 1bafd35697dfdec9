"""The split of each user's last events, beside pandas: by the operator, in a dataset, and in what users have had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.cli.init import write_pipeline
from headrace.cli.scaffold.roles import Named
from headrace.config import OpSpec, load_spec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.layout.split import SPLIT
from headrace.features.table_ops.base import FILE, LINE
from headrace.features.table_ops.preparation import Preparation
from headrace.jobs.stages import load_stage
from headrace.score.entities import ActiveEvents, seen
from headrace.stage import Context, run_stage
from headrace.stage.manifest import Manifest
from tests.tables_support import NOWHERE

_COLUMNS = [
    TableColumn(name="user", type="bigint"),
    TableColumn(name="item", type="bigint"),
    TableColumn(name="ts", type="timestamp"),
    TableColumn(name="clock", type="int"),
    TableColumn(name="click", type="int"),
]


def events(rows: int, seed: int, users: int = 25) -> pd.DataFrame:
    """Events with ties of times, and some without a user or a time."""
    rng = np.random.default_rng(seed)
    hours = rng.integers(0, 40, rows)
    frame = pd.DataFrame(
        {
            "user": pd.array(rng.integers(0, users, rows), "Int64"),
            "item": rng.integers(0, 30, rows),
            "ts": pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(hours, unit="h"),
            "clock": rng.integers(0, 3, rows),
            "click": 1,
            FILE: [f"f{k}" for k in rng.integers(0, 3, rows)],
            LINE: np.arange(rows),
        }
    )
    frame.loc[rng.random(rows) < 0.04, "user"] = None
    frame.loc[rng.random(rows) < 0.04, "ts"] = None
    return frame


def expected_splits(frame: pd.DataFrame, held_out: dict[str, int], order: list[str]) -> pd.Series:
    """The split of each row, by sorting each user's events."""
    splits = pd.Series("train", frame.index)
    for _, of_user in frame[frame["user"].notna() & frame["ts"].notna()].groupby("user"):
        newest = of_user.sort_values(["ts", *order, FILE, LINE]).index[::-1]
        if len(newest) <= sum(held_out.values()):
            continue
        start = 0
        for split in ("test", "rank", "valid"):
            splits.loc[newest[start : start + held_out.get(split, 0)]] = split
            start += held_out.get(split, 0)
    return splits


@pytest.mark.parametrize(
    ("held_out", "order"), [({"valid": 1}, []), ({"valid": 2, "rank": 1, "test": 3}, ["clock"]), ({"test": 1}, [])]
)
def test_each_users_last_events_are_held_out(spark: SparkSession, held_out: dict[str, int], order: list[str]) -> None:
    frame = events(180, seed=len(held_out))
    params = {"user": "user", "valid": 0, "order": order, **held_out}
    p = Preparation([OpSpec(op="last_events", params=params)], _COLUMNS, "click", "ts", True)
    rows = spark.createDataFrame(pa.Table.from_pandas(frame, preserve_index=False)).repartition(3)
    actual = p.spark(rows.withColumn("clock", F.col("clock").cast("int")), NOWHERE).toPandas().set_index(LINE)
    assert actual["split"].sort_index().tolist() == expected_splits(frame, held_out, order).tolist()
    assert len(actual) == len(frame)


def test_what_it_does_not_take() -> None:
    for params, message in (
        ({"user": "nobody"}, "column 'nobody' is not there"),
        ({"user": "user", "to": "item"}, "adds column 'item', which is already there"),
        ({"user": "user", "valid": 0}, "nothing would be held out"),
        ({"user": "click"}, "user: 'click' is the label"),
    ):
        with pytest.raises(UserError, match=message):
            Preparation([OpSpec(op="last_events", params=params)], _COLUMNS, "click", "ts", True)


def test_a_log_without_a_label_from_init_to_what_users_have_had(
    spark: SparkSession, ws: Workspace, tmp_path: Path
) -> None:
    """The last event of each user validates, and is among what the user has had."""
    frame = events(300, seed=9).dropna().drop(columns=[FILE, LINE, "click", "clock"])
    frame = frame.rename(columns={"user": "user_id", "item": "item_id"})
    frame.to_csv(tmp_path / "log.csv", index=False)
    write_pipeline(str(tmp_path / "log.csv"), tmp_path / "log.yaml", None, Named(), force=False)
    spec = load_spec(tmp_path / "log.yaml", ["features.min_row_groups=1"])
    assert spec.ds is not None
    manifests: dict[str, Manifest] = {}
    for stage in ("ingest", "features"):
        manifests[stage] = run_stage(load_stage(stage), spec, ws, spec.ds).manifest
    assert manifests["ingest"].rows["kept"] == len(frame)
    several = int((frame.groupby("user_id").size() > 1).sum())
    assert manifests["features"].rows == {"train": len(frame) - several, "valid": several}
    ctx = Context(ws=ws, spec=spec, ds=spec.ds, upstream=manifests, inputs=(), key="none")
    active = ActiveEvents.read(ctx, spark).events
    had = {(r["key"], item) for r in seen(spec, active, "user_id", "item_id").collect() for item in r["seen"]}
    assert had == set(frame[["user_id", "item_id"]].itertuples(index=False, name=None))


@pytest.mark.parametrize(("form", "has_label"), [("{0}:{1:02d}", False), ("{2}:{1:02d} {3}", True)])
def test_a_time_of_day_beside_a_date_orders_a_days_events(
    spark: SparkSession, ws: Workspace, tmp_path: Path, form: str, has_label: bool
) -> None:
    """The last event is that of the latest time of day, though the file has it elsewhere; with a label all are read."""
    rng = np.random.default_rng(4)
    minutes = np.stack([rng.permutation(24 * 60)[:200] for _ in range(2)])
    frame = pd.DataFrame(
        {
            "user_id": np.repeat(np.arange(20), 20),
            "item_id": rng.integers(0, 30, 400),
            "date": np.repeat(["01.12.2025", "13.12.2025"], 200),
            "time": [
                form.format(m // 60, m % 60, (m // 60 - 1) % 12 + 1, "pm" if m >= 720 else "AM")
                for m in minutes.reshape(-1)
            ],
        }
    )
    if has_label:
        frame["clicked"] = rng.integers(0, 2, 400)
    frame["minute"] = minutes.reshape(-1)
    frame.drop(columns="minute").to_csv(tmp_path / "log.csv", index=False, sep=";")
    write_pipeline(str(tmp_path / "log.csv"), tmp_path / "log.yaml", None, Named(), force=False)
    spec = load_spec(tmp_path / "log.yaml", ["features.min_row_groups=1", "features.carried=[user_id, event_moment]"])
    assert spec.ds is not None
    run_stage(load_stage("ingest"), spec, ws, spec.ds)
    built = run_stage(load_stage("features"), spec, ws, spec.ds).manifest
    valid = pd.read_parquet(ws.home / built.output("dataset").name / "valid")
    clock = "%I:%M %p" if has_label else "%H:%M"
    events_at = pd.to_datetime(frame["date"] + " " + frame["time"], format=f"%d.%m.%Y {clock}", utc=True)
    expected = events_at[frame["date"] == "13.12.2025"] if has_label else events_at.groupby(frame["user_id"]).max()
    # The dataset has codes of users; no two events have one time.
    moments = pd.to_datetime(valid["event_moment"].to_numpy(), unit="us", utc=True)
    assert sorted(moments) == sorted(expected)


@pytest.mark.parametrize(("split", "counts"), [({"by": "position"}, True), ({"by": "column", "column": "part"}, False)])
def test_what_users_have_had_in_validation(
    spark: SparkSession, tmp_path: Path, split: dict[str, str], counts: bool
) -> None:
    """Rows that validate are had, unless a column of the source says which rows may be known."""
    text = "user_id,item_id,label,part,x\n" + "".join(f"{n % 7},{n % 5},{n % 2},train,{n}\n" for n in range(60))
    (tmp_path / "log.csv").write_text(text)
    write_pipeline(str(tmp_path / "log.csv"), tmp_path / "log.yaml", None, Named(), force=False)
    spec = load_spec(tmp_path / "log.yaml")
    spec = spec.model_copy(
        update={"features": spec.features.model_copy(update={"split": type(spec.features.split)(**split)})}
    )
    rows = spark.createDataFrame(
        [(1, 10, 1, "train"), (1, 11, 1, "valid"), (1, 12, 0, "valid")],
        f"user_id int, item_id int, label int, {SPLIT} string",
    )
    (row,) = seen(spec, rows, "user_id", "item_id").collect()
    assert sorted(row["seen"]) == ([10, 11] if counts else [10])
    (row,) = seen(spec, rows, "user_id", "item_id", any_label=True).collect()
    assert sorted(row["seen"]) == ([10, 11, 12] if counts else [10])
