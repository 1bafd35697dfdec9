"""A file every few minutes, of three rows each: Parquet files by day, and gzipped JSON lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported import click_log as log
from tests.reported.support import build_features, ingest, pipeline, read_table
from tests.spark.test_features_stage import dataset, read

#: Rows of a file, and files of a day.
ROWS, FILES = 3, 120
FEATURES = {
    "workflow": [
        {"columns": ["user_id"], "ops": ["categorify"]},
        {"columns": ["price"], "ops": ["fill_missing", "normalize"]},
    ],
    "carried": ["event_id"],
}


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_rows_of_all_files(spark: SparkSession, tmp_path: Path, form: str) -> None:
    rows = log.click_log(ROWS * FILES)
    for day, part in log.by_day(rows).items():
        for k in range(FILES):
            some = part.iloc[ROWS * k : ROWS * (k + 1)]
            path = tmp_path / form / (f"dt={day}/{k:05}.parquet" if form == "parquet" else f"{day}/{k:05}.json.gz")
            path.parent.mkdir(parents=True, exist_ok=True)
            if form == "parquet":
                pq.write_table(log.utc(some), path)
            else:
                lines = (row | {"ts": row["ts"].isoformat() + "Z"} for row in some.to_dict("records"))
                path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    source = {"format": "parquet", "path": str(tmp_path / form), "day": {"partition": "dt"}}
    if form == "json":
        source = {"format": "jsonl", "path": f"{tmp_path}/{form}/{{ds}}/*.json.gz"}
    spec = pipeline(source, log.COLUMNS, table={"keys": ["event_id"], "event_time": "ts"}, features=FEATURES)
    ws = Workspace(tmp_path / "home")
    if form == "parquet":
        actual = log.kept_rows(spark, spec, ws, log.DAYS[-1])
    else:
        assert ingest(spec, ws, log.DAYS[-1]).manifest.rows["kept"] == len(rows)
        actual = read_table(spark, ws).sort_values("event_id").reset_index(drop=True)
    columns = ["event_id", "user_id", "price", "clicked"]
    pd.testing.assert_frame_equal(actual[columns], rows[columns], check_dtype=False)
    folder = dataset(ws, build_features(spec, ws, log.DAYS[-1]).manifest)
    dataset_rows = pd.concat([read(folder, split) for split in ("train", "valid")])
    assert sorted(dataset_rows["event_id"]) == rows.event_id.tolist()
    by_user = dataset_rows.groupby("user_id").size().sort_values().tolist()
    assert by_user == rows.groupby("user_id").size().sort_values().tolist()
