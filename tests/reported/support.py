"""Running stages over a reported input, and reading back what they kept and what they refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.features.build.stage import BuildFeatures
from headrace.lake.ingest.stage import Ingest
from headrace.stage import Outcome, run_stage
from headrace.workspace import Workspace


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
