"""Running stages over a reported input, and reading back what they kept and what they refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.jobs.stages import load_stage
from headrace.lake.landing.stage import Ingest
from headrace.stage import Outcome, run_stage
from headrace.stage.manifest import Manifest


def pipeline(
    source: Mapping[str, Any],
    columns: list[dict[str, Any]],
    *,
    table: Mapping[str, Any] | None = None,
    features: Mapping[str, Any] | None = None,
) -> Spec:
    """Build the spec of pipeline `reported` with label `clicked`; `table` and `features` add to the defaults."""
    return build_spec(
        {
            "pipeline": "reported",
            "source": dict(source),
            "table": {"columns": columns, "expectations": {"max_bad_rate": 1}} | dict(table or {}),
            "features": {"label": "clicked", "workflow": [], "split": {"by": "position"}} | dict(features or {}),
        }
    )


def ingest(spec: Spec, ws: Workspace, ds: str) -> Outcome:
    """Run the stage `ingest` of one day."""
    return run_stage(Ingest(), spec, ws, ds)


def build_features(spec: Spec, ws: Workspace, ds: str) -> Outcome:
    """Run the stage `features` of one day."""
    return run_stage(BuildFeatures(), spec, ws, ds)


def read_table(spark: SparkSession, ws: Workspace, name: str = "events") -> pd.DataFrame:
    """Read a Delta table of the pipeline (`events`, `quarantine`) in the order of its source files and lines."""
    frame = spark.read.format("delta").load(str(ws.table("reported", name))).toPandas()
    return frame.sort_values(["ds", "_source_file", "_source_line"], kind="stable").reset_index(drop=True)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their names below `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def click_log(days: Sequence[str], rows_per_day: int = 400, seed: int = 1) -> pd.DataFrame:
    """Draw events of 40 users and 25 items in the order of their times; the user's and the item's taste decide."""
    rng = np.random.default_rng(seed)
    n = rows_per_day * len(days)
    user, item = rng.integers(0, 40, n), rng.integers(0, 25, n)
    taste = rng.normal(0, 1, 40)[user] + rng.normal(0, 1, 25)[item]
    seconds = np.repeat(np.arange(len(days)), rows_per_day) * 86_400 + rng.integers(0, 86_400, n)
    frame = pd.DataFrame(
        {
            "ts": pd.Timestamp(days[0], tz="UTC") + pd.to_timedelta(seconds, unit="s"),
            "user_id": 100_000 + user,
            "item_id": 500 + item,
            "device": rng.choice(["mobile", "desktop", "tablet"], n),
            "price": rng.lognormal(2, 1, n).round(2),
            "clicked": (rng.random(n) < 1 / (1 + np.exp(-taste))).astype(np.int32),
        }
    )
    frame = frame.sort_values("ts", kind="stable").reset_index(drop=True)
    frame.insert(0, "event_id", np.arange(n))
    return frame


def write_days(frame: pd.DataFrame, folder: Path) -> None:
    """Write a click log as `DAY.csv`, a file a day; a null is an empty field."""
    folder.mkdir(parents=True)
    for day, part in frame.groupby(frame["ts"].dt.date.astype(str)):
        part.assign(ts=part["ts"].dt.strftime("%Y-%m-%dT%H:%M:%SZ")).to_csv(folder / f"{day}.csv", index=False)


def click_pipeline(folder: Path, columns: Mapping[str, str], features: Mapping[str, Any], **more: Any) -> Spec:
    """Build the spec of a whole day over `write_days`; `columns` are further ones, `more` further sections."""
    types = {"event_id": "bigint", "ts": "timestamp", "user_id": "bigint", "item_id": "bigint", "device": "string"}
    types |= {"price": "double", "clicked": "int", **columns}
    sections: dict[str, Any] = {
        "pipeline": "reported",
        "source": {"format": "csv", "path": f"{folder}/{{ds}}.csv"},
        "table": {
            "keys": ["event_id"],
            "event_time": "ts",
            "columns": [{"name": name, "type": type_} for name, type_ in types.items()],
        },
        "features": {"label": "clicked", "split": {"by": "time", "valid_days": 1}} | dict(features),
        "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "train": {"ranks": 1, "batch_size": 128, "streams": 2, "epochs": 1},
        "publish": {"warehouse": {"kind": "duckdb", "path": f"{folder}/scores.duckdb"}},
    }
    return build_spec(sections | more)


def run_day(spec: Spec, ws: Workspace, ds: str, *stages: str) -> dict[str, Manifest]:
    """Run stages of a day in this process and its Spark session, in their order; return their manifests by name."""
    return {name: run_stage(load_stage(name), spec, ws, ds).manifest for name in stages}


def published(folder: Path) -> pd.DataFrame:
    """Read the scores that `click_pipeline` publishes, in the order of day, user and rank."""
    with duckdb.connect(f"{folder}/scores.duckdb", read_only=True) as db:
        return db.execute("SELECT * FROM reported_scores ORDER BY ds, user_id, rank").df()
