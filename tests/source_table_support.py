"""A pipeline whose source is a table, for the tests of ingest and features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.lake.landing.stage import Ingest
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest

D1, D2, D3, D4 = "2026-03-01", "2026-03-02", "2026-03-03", "2026-03-04"
DDL = "id bigint, ts timestamp, user string, item bigint, price double, click int, dt date"
COLUMNS = [
    {"name": "id", "type": "bigint", "required": True},
    {"name": "ts", "type": "timestamp", "required": True},
    {"name": "user", "type": "string"},
    {"name": "item", "type": "bigint"},
    {"name": "price", "type": "double"},
    {"name": "click", "type": "int", "required": True},
]


def make_spec(
    source: Mapping[str, Any],
    table: Mapping[str, Any] | None = None,
    features: Mapping[str, Any] | None = None,
    sources: Mapping[str, Any] | None = None,
) -> Spec:
    declared: dict[str, Any] = {
        "columns": COLUMNS,
        "keys": ["id"],
        "event_time": "ts",
        "late_days": 1,
        "expectations": {"max_bad_rate": 0.5, "ranges": {"click": [0, 1]}},
    }
    defaults: dict[str, Any] = {
        "label": "click",
        "window_days": 2,
        "split": {"by": "time", "valid_days": 1},
        "carried": ["id"],
        "row_group_rows": 100,
        "min_row_groups": 2,
        "workflow": [
            {"columns": ["price"], "ops": ["fill_missing", "normalize"]},
            {"columns": ["user", "item"], "ops": ["categorify"]},
        ],
    }
    return build_spec(
        {
            "pipeline": "shop",
            "source": dict(source),
            "table": declared | dict(table or {}),
            "features": defaults | dict(features or {}),
            "sources": dict(sources or {}),
        }
    )


def make_rows(rows: int = 300, first: int = 0, day: str | None = None) -> pd.DataFrame:
    """Events of D1 .. D3 in turn (or of one day), every tenth of the day before the partition that it is in."""
    records = []
    for i in range(first, first + rows):
        dt = datetime.fromisoformat(day or (D1, D2, D3)[i % 3]).replace(tzinfo=UTC)
        ts = dt + timedelta(hours=i % 24, seconds=i % 7) - (timedelta(days=1) if i % 10 == 9 else timedelta(0))
        user = None if i % 13 == 0 else f"u{i % 17}"
        records.append((i, ts, user, i % 29, i / 8, int(i % 4 == 0), dt.date()))
    return pd.DataFrame(records, columns=["id", "ts", "user", "item", "price", "click", "dt"])


def frame(spark: SparkSession, rows: pd.DataFrame) -> DataFrame:
    """Rows of `make_rows`, with the types of DDL."""
    return spark.createDataFrame(arrow_rows(rows))


def arrow_rows(rows: pd.DataFrame) -> pa.Table:
    """The same as an Arrow table."""
    types = [pa.int64(), pa.timestamp("us", "UTC"), pa.string(), pa.int64(), pa.float64(), pa.int32(), pa.date32()]
    columns = {name: pa.array(list(rows[name]), t) for name, t in zip(rows.columns, types, strict=True)}
    return pa.table(columns)


def quarantined(spark: SparkSession, ws: Workspace) -> dict[int, str]:
    """Reason by id."""
    records = spark.read.format("delta").load(str(ws.quarantine("shop"))).collect()
    return {json.loads(r["_raw"])["id"]: r["_reason"] for r in records}


def ingest(spec: Spec, ws: Workspace, ds: str) -> Manifest:
    return run_stage(Ingest(), spec, ws, ds).manifest


def dataset(spec: Spec, ws: Workspace, ds: str) -> dict[str, pd.DataFrame]:
    """Build the features of a day, and return the rows of each split."""
    manifest = run_stage(BuildFeatures(), spec, ws, ds).manifest
    folder = Path(ws.locate(manifest.output("dataset").name).local_path())
    return {
        split: pa.concat_tables([pq.read_table(f) for f in sorted((folder / split).glob("*.parquet"))]).to_pandas()
        for split in ("train", "valid")
    }


def ids(frames: Mapping[str, pd.DataFrame]) -> dict[str, list[int]]:
    """The rows of each split, by their carried ids."""
    return {split: sorted(int(i) for i in frame["id"]) for split, frame in frames.items()}


def expected(rows: pd.DataFrame, valid: str = D3) -> dict[str, list[int]]:
    """The ids that a dataset of the day `valid` has: two days before it train."""
    day = rows["ts"].dt.tz_convert("UTC").dt.strftime("%Y-%m-%d")
    first = (datetime.fromisoformat(valid) - timedelta(days=2)).date().isoformat()
    return {
        "train": sorted(int(i) for i in rows["id"][(day >= first) & (day < valid)]),
        "valid": sorted(int(i) for i in rows["id"][day == valid]),
    }
