"""Running headrace as a user does, and reading back all that a day made, for comparisons; settings that tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from safetensors.numpy import load_file

from headrace.config import Warehouse, load_spec
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.publish.postgres.server import connect
from headrace.stage.manifest import Manifest
from tests.train_support import padded

DAY = "2026-01-03"
NEXT_DAY = "2026-01-04"

#: A day small enough for a test, with every stage real.
SMALL = {
    "generate.rows_per_day": 4000,
    "generate.users": 300,
    "generate.items": 60,
    "table.expectations.freshness_hours": 24,
    "train.epochs": 2,
    "train.batch_size": 512,
    "train.checkpoint_steps": 5,
    "model.embedding_dim": 8,
    "baseline.rounds": 5,
    "score.item.limit": 20,
    "spark.master": "local[2]",
    "spark.driver_memory": "1g",
}


@dataclass(frozen=True)
class Run:
    """A finished command."""

    code: int
    output: str


def command(home: Path, *words: str, settings: Mapping[str, Any] = SMALL) -> list[str]:
    """The command line of `headrace WORDS... --home HOME --set ...`."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "headrace.cli", *words, "--home", str(home), *sets]


def headrace(home: Path, *words: str, settings: Mapping[str, Any] = SMALL) -> Run:
    """Run headrace to its end."""
    completed = subprocess.run(
        command(home, *words, settings=settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
        timeout=540,
    )
    return Run(completed.returncode, completed.stdout)


def manifests(home: Path, ds: str = DAY, pipeline: str = "clicks") -> dict[str, Manifest]:
    """The manifests of a day, by stage."""
    ws = Workspace(home)
    by_stage = {stage: Manifest.load(ws.manifest(pipeline, ds, stage)) for stage in ORDER}
    return {stage: m for stage, m in by_stage.items() if m is not None}


def read_delta(spark: SparkSession | None, path: Path, *order: str) -> pd.DataFrame:
    """Return a whole Delta table in a fixed order, read by Spark or, without a session, by delta-rs."""
    if spark is None:
        table = DeltaTable(str(path))
        empty = pd.DataFrame(columns=[field.name for field in table.schema().fields])
        frame = pd.concat([_read_data_file(Path(file)) for file in table.file_uris()] or [empty])
    else:
        frame = spark.read.format("delta").load(str(path)).toPandas()
    columns = sorted(frame.columns)
    for column in columns:  # lists compare and sort as text
        if frame[column].map(lambda v: isinstance(v, (list, np.ndarray))).any():
            frame[column] = frame[column].map(lambda v: None if v is None else "|".join(map(str, v)))
    return frame[columns].sort_values(list(order) or columns, kind="stable").reset_index(drop=True)


def _read_data_file(file: Path) -> pd.DataFrame:
    """Return a data file's rows, with the columns that its folders name (partitions by text)."""
    partitions = dict(part.split("=", 1) for part in file.parent.parts if "=" in part)
    return pq.ParquetFile(file).read().to_pandas().assign(**{name: unquote(text) for name, text in partitions.items()})


def everything(spark: SparkSession | None, home: Path, ds: str = DAY, pipeline: str = "clicks") -> dict[str, Any]:
    """Return all that a day's finished stages leave for others to read, in a form that two workspaces can share.

    Compare two that were read in the same way: both with a session, or both without (`read_delta`).
    """
    ws = Workspace(home)
    day_manifests = manifests(home, ds, pipeline)
    # Ingest counts the days that a run loaded, and a rerun after a kill loads what was left: the tables are compared.
    contents: dict[str, Any] = {"rows": {stage: m.rows for stage, m in day_manifests.items() if stage != "ingest"}}
    if "ingest" in day_manifests:
        for name in ("events", "quarantine"):
            contents[name] = read_delta(spark, ws.table(pipeline, name), "_source_file", "_source_line")
    if "features" in day_manifests:
        contents["vocabulary"] = read_delta(spark, ws.table(pipeline, "vocabulary"), "name", "code")
        dataset, schema = (
            ws.home / day_manifests["features"].output("dataset").name,
            day_manifests["features"].dataset_schema,
        )
        assert schema is not None
        for split in ("train", "valid"):
            contents[f"dataset {split}"] = padded(pads.dataset(dataset / split, format="parquet").to_table(), schema)
    if "train" in day_manifests:
        model = ws.home / day_manifests["train"].output("model").name
        for path in sorted(model.rglob("*.safetensors")):
            for name, array in load_file(path).items():
                contents[f"model {path.relative_to(model)} {name}"] = array
    contents["metrics"] = {
        stage: day_manifests[stage].facts["metrics"] for stage in ("train", "baseline") if stage in day_manifests
    }
    for stage, table in (("score", "scores"), ("publish", "published")):
        if stage in day_manifests:
            # Keys are made of Delta versions, among others, and a healed day may have taken one commit more.
            contents[table] = read_delta(spark, ws.table(pipeline, table), "ds", "user_id", "rank").drop(
                columns=["model_version", "published_key"], errors="ignore"
            )
    if "publish" in day_manifests:
        with connect(Warehouse(), ws) as db:
            columns = "ds::text, user_id, item_id, rank, score"
            contents["warehouse"] = db.execute(
                f"SELECT {columns} FROM {pipeline}_scores ORDER BY ds, user_id, rank"
            ).fetchall()
    return contents


def assert_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Every part equal, to the bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        right_value = right[name]
        if isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(value, right_value, check_exact=True, obj=name)
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, right_value, err_msg=name)
        else:
            assert value == right_value, name


#: In the day's order.
CLICKS_STAGES = tuple(name for name in ORDER if STAGES[name].applies(load_spec("clicks")))


#: Spark's expressions by Java code that it generates for each plan, as they run anywhere else, or by its interpreter of
#: the same expressions: for tests of few rows and many plans, of which the compiler would take a quarter of the time.
GENERATED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
#: Of executors of this machine, for few rows: what headrace sets for local masters alone.
FEW_ROWS = INTERPRETED | {
    "spark.sql.shuffle.partitions": "4",
    "spark.python.daemon.module": "headrace.lake.spark.worker_daemon",
}
