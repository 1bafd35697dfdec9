"""Delta tables with what newer writers turn on, by name in a catalog and as of a time, against Spark's own reading."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.lake.delta.log import DeltaLog, commit_times
from headrace.storage import local
from tests.source_table_support import (
    COLUMNS,
    D3,
    arrow_rows,
    dataset,
    expected,
    frame,
    ids,
    ingest,
    make_rows,
    make_spec,
)


def commit_time(version: int) -> str:
    return f"2026-03-10T12:{version:02d}:00+00:00"


def test_v2_checkpoints_mapping_by_id_wider_types_and_local_times(spark: SparkSession, ws: Workspace) -> None:
    """A table of Spark's catalog; days by a time without zone; the version by a time, and by its number."""
    spark.sql("CREATE DATABASE IF NOT EXISTS newer")
    try:
        properties = (
            "'delta.checkpointPolicy' = 'v2', 'delta.columnMapping.mode' = 'id', 'delta.checkpointInterval' = '3', "
            "'delta.enableDeletionVectors' = 'true', 'delta.enableTypeWidening' = 'true'"
        )
        spark.sql(
            "CREATE TABLE newer.events (id bigint, at timestamp_ntz, who struct<name: string>, "
            f"more map<string, bigint>, price double, click int) USING delta TBLPROPERTIES ({properties})"
        )
        rows = make_rows()
        frame(spark, rows).createOrReplaceTempView("rows")
        selected = "SELECT id, CAST(ts AS timestamp_ntz), struct(user), map('item', item), price, click FROM rows"
        for k in range(3):  # 1 to 3
            spark.sql(f"INSERT INTO newer.events {selected} WHERE id % 3 = {k}")
        spark.sql("DELETE FROM newer.events WHERE id % 11 = 0")  # 4
        spark.sql("UPDATE newer.events SET price = -1 WHERE id < 5")  # 5
        spark.sql("DELETE FROM newer.events WHERE id >= 290")  # 6
        spark.sql("ALTER TABLE newer.events ALTER COLUMN click TYPE bigint")  # 7
        path = Path(spark.sql("DESCRIBE DETAIL newer.events").collect()[0]["location"].removeprefix("file:"))
        log = path / "_delta_log"
        assert list(log.glob("*3.checkpoint.*-*.*"))
        for version in range(8):
            commit = log / f"{version:020d}.json"
            if version < 3:
                # A log that was cleaned up to its checkpoint.
                commit.unlink()
                continue
            os.utime(commit, (datetime.fromisoformat(commit_time(version)).timestamp(),) * 2)
        times = {r["version"]: r["timestamp"] for r in spark.sql("DESCRIBE HISTORY newer.events").collect()}
        assert {v: datetime.fromtimestamp(t / 1e3, UTC) for v, t in commit_times(DeltaLog(local(path))).items()} == {
            v: t.astimezone(UTC) for v, t in times.items()
        }

        columns = [
            COLUMNS[0],
            {"name": "ts", "type": "timestamp", "path": "at", "required": True},
            {"name": "user", "path": "who.name"},
            {"name": "item", "type": "bigint", "path": "more['item']"},
            *COLUMNS[4:],
        ]
        source = {"table": "newer.events", "day": {"time": "at"}, "timezone": "America/New_York"}
        workflow = [{"columns": ["price"], "ops": []}, {"columns": ["user", "item"], "ops": ["categorify"]}]
        for pin, version in (({"as_of": commit_time(4)}, 4), ({"version": 5}, 5), ({}, 7)):
            spec = make_spec(source | pin, {"columns": columns, "late_days": 3}, {"workflow": workflow})
            home = Workspace(ws.home / str(version))
            manifest = ingest(spec, home, D3)
            assert manifest.outputs[0].version == str(version)
            seen = spark.sql(f"SELECT id, at, price FROM newer.events VERSION AS OF {version}").toPandas()
            # Times without a zone are of the source's.
            local_day = seen["at"].dt.strftime("%Y-%m-%d")
            assert manifest.rows["read"] == (local_day <= D3).sum()
            local_rows = seen.assign(ts=seen["at"].dt.tz_localize("America/New_York"))[local_day <= D3]
            frames = dataset(spec, home, D3)
            assert ids(frames) == expected(local_rows)
            every = pd.concat(frames.values()).set_index("id")["price"].sort_index()
            assert every.to_dict() == local_rows.set_index("id")["price"].loc[every.index].to_dict()
        with pytest.raises(UserError, match=r"source\.as_of: the log of newer\.events has no commit up to"):
            ingest(make_spec(source | {"as_of": commit_time(2)}, {"columns": columns}), Workspace(ws.home / "none"), D3)
    finally:
        spark.sql("DROP DATABASE newer CASCADE")


def test_tables_as_named_sources(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Purchases are a Delta table, plans a folder of Parquet; what was pinned is read, whatever comes later."""
    rows = make_rows()
    frame(spark, rows).write.format("delta").partitionBy("dt").save(str(tmp_path / "events"))
    bought = pd.DataFrame(
        [(f"u{i % 17}", pd.Timestamp("2026-02-28", tz="UTC") + pd.Timedelta(hours=i)) for i in range(80)],
        columns=["buyer", "paid_at"],
    )
    plans = [(f"u{i}", i, datetime(2026, 1, 1, tzinfo=UTC)) for i in range(0, 17, 2)]

    def put_purchases(mode: str) -> None:
        spark.createDataFrame(bought).write.format("delta").mode(mode).save(str(tmp_path / "purchases"))

    put_purchases("error")
    spark.createDataFrame(plans, "user string, plan int, since timestamp").coalesce(1).write.parquet(
        str(tmp_path / "plans")
    )

    def source_of(name: str, format_: str, columns: dict[str, str], time: str) -> dict[str, object]:
        table = {"columns": [{"name": n, "type": t} for n, t in columns.items()], "event_time": time}
        return {"source": {"format": format_, "path": str(tmp_path / name)}, "table": table}

    features = {
        "workflow": [{"columns": ["user_purchases_count_1d", "plan"], "ops": ["fill_missing"]}],
        "prepare": [
            {"trailing": {"from": "purchases", "keys": {"user": "buyer"}, "windows": [1]}},
            {"join_asof": {"from": "plans", "keys": ["user"], "add": ["plan"]}},
        ],
    }
    spec = make_spec(
        {"format": "delta", "path": str(tmp_path / "events"), "day": {"partition": "dt"}},
        {},
        features,
        {
            "purchases": source_of("purchases", "delta", {"buyer": "string", "paid_at": "timestamp"}, "paid_at"),
            "plans": source_of("plans", "parquet", {"user": "string", "plan": "int", "since": "timestamp"}, "since"),
        },
    )
    manifest = ingest(spec, ws, D3)
    pinned = {o.name: o.version for o in manifest.outputs if o.kind == "table"}
    assert pinned[str(tmp_path / "purchases")] == "0"
    assert set(pinned) == {str(tmp_path / n) for n in ("events", "purchases", "plans")}
    # A purchase that comes after the pin, in the past of many events.
    put_purchases("append")
    frames = dataset(spec, ws, D3)
    assert ids(frames) == expected(rows)
    of_user, day = {user: plan for user, plan, _ in plans}, pd.Timedelta(days=1)
    for e in pd.concat(frames.values()).merge(rows[["id", "ts", "user"]], on="id").itertuples():
        paid_times = bought[bought["buyer"] == e.user]["paid_at"]
        assert e.user_purchases_count_1d == ((paid_times < e.ts) & (paid_times >= e.ts - day)).sum()
        assert e.plan == of_user.get(e.user, 0)
    # Files that are others than those that were pinned are noticed.
    (tmp_path / "plans" / "more.parquet").write_bytes(next((tmp_path / "plans").glob("part-*.parquet")).read_bytes())
    with pytest.raises(UserError, match=r"plans of .* are others than when ingest ran|others than when ingest ran"):
        dataset(spec.model_copy(update={"features": spec.features.model_copy(update={"row_group_rows": 50})}), ws, D3)


def test_a_folder_is_taken_when_it_has_its_success_file(ws: Workspace, tmp_path: Path) -> None:
    rows = make_rows(30)
    for dt, of_day in rows.groupby("dt"):
        folder = tmp_path / "events" / f"dt={dt}"
        folder.mkdir(parents=True)
        pq.write_table(arrow_rows(of_day).drop_columns(["dt"]), folder / "a.parquet")
    source = {
        "format": "parquet",
        "path": str(tmp_path / "events"),
        "day": {"partition": "dt"},
        "complete": {"success_file": "_SUCCESS", "control": {"path": str(tmp_path / "{ds}.rows")}},
    }
    (tmp_path / f"{D3}.rows").write_text("10")
    with pytest.raises(IncompleteError, match=f"{D3} is not complete yet: _SUCCESS is not in .*dt={D3}"):
        ingest(make_spec(source), ws, D3)
    (tmp_path / "events" / f"dt={D3}" / "_SUCCESS").touch()
    assert ingest(make_spec(source), ws, D3).facts["days"] == [D3]
