"""A day's dataset from four tables: events, clicks that label them, purchases by date, a dump of plans each day."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as pads
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest, Output

START, DS = datetime(2026, 1, 1, tzinfo=UTC), "2026-01-08"
TABLES: dict[str, dict[str, str]] = {
    "events": {"id": "bigint", "user": "bigint", "ts": "timestamp"},
    "clicks": {"id": "bigint", "at": "timestamp"},
    "purchases": {"buyer": "bigint", "day": "date"},
    "plans": {"user": "bigint", "plan": "int"},
}
TIMES = {"events": "ts", "clicks": "at", "purchases": "day", "plans": None}


def declared(name: str) -> dict[str, Any]:
    columns = [{"name": n, "type": t} for n, t in TABLES[name].items()]
    table = {"columns": columns, "event_time": TIMES[name]}
    return {"source": {"format": "jsonl", "path": f"{{ds}}/{name}"}, "table": table}


def make_spec(engine: str = "arrow") -> Spec:
    return build_spec(
        {
            "pipeline": "shop",
            **declared("events"),
            "sources": {name: declared(name) for name in ("clicks", "purchases", "plans")},
            "features": {
                "engine": engine,
                "label": "clicked",
                "window_days": 3,
                "split": {"by": "time", "valid_days": 1},
                "min_row_groups": 1,
                "carried": ["id"],
                "prepare": [
                    {"attribution": {"from": "clicks", "keys": ["id"], "within": "1 day", "add": "clicked"}},
                    {"trailing": {"from": "purchases", "keys": {"user": "buyer"}, "windows": [3]}},
                    {"join_asof": {"from": "plans", "keys": ["user"], "add": ["plan"]}},
                ],
                "workflow": [{"columns": ["user_purchases_count_3d", "plan"], "ops": ["fill_missing"]}],
            },
        }
    )


def make_rows(days: int) -> dict[str, pd.DataFrame]:
    """Return the rows that land in so many days; fewer days give the same rows but for the missing days."""
    records: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
    for k in range(days):
        rng, midnight = np.random.default_rng(k), START + k * timedelta(days=1)
        ds = midnight.date().isoformat()
        for i in range(60):
            moment = midnight + timedelta(minutes=int(rng.integers(0, 1440)))
            records["events"].append((1000 * k + i, int(rng.integers(0, 9)), moment, ds))
        for _ in range(40):
            moment = midnight + timedelta(minutes=int(rng.integers(0, 1440)))
            records["clicks"].append((1000 * (k - int(rng.integers(0, 3))) + int(rng.integers(0, 60)), moment, ds))
        for _ in range(10):
            records["purchases"].append((int(rng.integers(0, 9)), midnight.date(), ds))
        records["plans"] += [(u, 10 * k + u, ds) for u in range(8)]
    return {name: pd.DataFrame(rows, columns=[*TABLES[name], "ds"]) for name, rows in records.items()}


def land(spark: SparkSession, ws: Workspace, rows: dict[str, pd.DataFrame], version: int) -> None:
    outputs = []
    for name, of_table in rows.items():
        ddl = ", ".join([*(f"{n} {t}" for n, t in TABLES[name].items()), "ds string"])
        plain = (
            tuple(v.to_pydatetime() if isinstance(v, pd.Timestamp) else v for v in row)
            for row in of_table.itertuples(index=False, name=None)
        )
        frame = spark.createDataFrame(plain, ddl)
        frame = frame.selectExpr("*", "concat(ds, '.json') AS _source_file", "xxhash64(*) AS _source_line")
        frame.write.format("delta").partitionBy("ds").mode("overwrite").save(str(ws.table("shop", name)))
        outputs.append(Output(kind="delta", name=f"lake/shop/{name}", version=str(version)))
    manifest = Manifest(stage="ingest", pipeline="shop", ds=DS, key=f"k{version}", spec_hash="", outputs=tuple(outputs))
    manifest.save(ws.manifest("shop", DS, "ingest"))


def expected(rows: dict[str, pd.DataFrame], first: int, last: int) -> pd.DataFrame:
    """The rows of some days, by pandas."""
    day = timedelta(days=1)
    events = rows["events"]
    events = events[(events["ts"] >= START + first * day) & (events["ts"] < START + (last + 1) * day)]
    hits = events.merge(rows["clicks"], on="id")
    hits = set(hits[(hits["at"] >= hits["ts"]) & (hits["at"] < hits["ts"] + day)]["id"])
    bought = rows["purchases"].assign(known=pd.to_datetime(rows["purchases"]["day"], utc=True) + day)
    records = []
    for e in events.itertuples():
        purchases = bought[bought["buyer"] == e.user]["known"]
        # Known in the last microsecond of its day.
        count = int(((purchases <= e.ts) & (purchases > e.ts - 3 * day)).sum())
        dumps = rows["plans"]
        dumps = dumps[(dumps["user"] == e.user) & (dumps["ds"] < e.ts.date().isoformat())]
        records.append((e.id, float(e.id in hits), float(count), float(dumps["plan"].iloc[-1]) if len(dumps) else 0.0))
    return pd.DataFrame(records, columns=["id", "clicked", "user_purchases_count_3d", "plan"])


def test_a_day_of_several_sources(spark: SparkSession, ws: Workspace) -> None:
    rows = make_rows(8)
    land(spark, ws, rows, 0)
    features_manifest = run_stage(BuildFeatures(), make_spec(), ws, DS).manifest
    assert run_stage(BuildFeatures(), make_spec(), ws, DS).skipped
    assert {i.name: i.version for i in features_manifest.inputs if i.kind == "delta"} == {
        f"lake/shop/{name}": "0" for name in TABLES
    }
    # Labels take a day: the 7th is the last one whose rows have theirs.
    assert (features_manifest.facts["train_range"], features_manifest.facts["valid_range"]) == (
        ["2026-01-04", "2026-01-06"],
        ["2026-01-07"] * 2,
    )

    def dataset(manifest: Manifest, split: str) -> Any:
        return pads.dataset(ws.home / manifest.output("dataset").name / split, format="parquet").to_table()

    for split, first, last in (("train", 3, 5), ("valid", 6, 6)):
        expected_rows = expected(rows, first, last)
        assert 0 < expected_rows["clicked"].sum() < len(expected_rows)
        assert expected_rows["user_purchases_count_3d"].nunique() > 2
        actual = (
            dataset(features_manifest, split)
            .to_pandas()
            .sort_values("id")[list(expected_rows.columns)]
            .reset_index(drop=True)
        )
        pd.testing.assert_frame_equal(actual, expected_rows, check_dtype=False)

    # Landing days after ds, which a later run loaded, are not seen; nor does the engine matter.
    more = make_rows(10)
    assert date.fromisoformat(more["clicks"]["ds"].max()) > date.fromisoformat(DS)
    land(spark, ws, more, 1)
    rerun = run_stage(BuildFeatures(), make_spec("spark"), ws, DS).manifest
    assert rerun.key != features_manifest.key
    for split in ("train", "valid"):
        assert dataset(rerun, split).equals(dataset(features_manifest, split))
