"""A pipeline as `headrace init` wrote it, untouched, through ingest and features, beside pandas on the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from headrace.cli.init import write_pipeline
from headrace.cli.scaffold.roles import Named
from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.jobs.stages import load_stage
from headrace.lake.spark.session import iceberg_jars, spark_settings
from headrace.stage import run_stage
from headrace.storage import local
from tests.scaffold_support import clicks
from tests.train_support import read_padded


def test_it_runs_as_it_was_written(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """With a label of two words, prices in euros, a nameless index and no users: `prepare` makes label and users."""
    data = clicks(1_200, 3).drop(columns=["userId", "impression_id"])
    data["user_country"] = data.pop("country")
    data["outcome"] = np.where(data.pop("clicked") == 1, "click", "view")
    file = tmp_path / "log.csv.gz"
    data.assign(item_price=[f"{p:.2f} €" for p in data["item_price"]]).to_csv(file)
    write_pipeline(str(file), tmp_path / "log.yaml", None, Named(), force=False)
    spec = load_spec(tmp_path / "log.yaml", ["features.min_row_groups=1"])
    assert spec.ds is not None
    loaded = run_stage(load_stage("ingest"), spec, ws, spec.ds).manifest
    assert (loaded.rows["kept"], loaded.rows["quarantined"]) == (len(data), 0)
    manifest = run_stage(load_stage("features"), spec, ws, spec.ds).manifest
    day = pd.to_datetime(data["ts"]).dt.strftime("%Y-%m-%d")
    assert manifest.rows == {"train": int((day < spec.ds).sum()), "valid": int((day == spec.ds).sum())}
    folder = ws.home / manifest.output("dataset").name
    schema = FittedWorkflow.load(local(folder / "workflow")).schema
    for split, expected_rows in (("train", data[day < spec.ds]), ("valid", data[day == spec.ds])):
        actual = read_padded(sorted((folder / split).glob("*.parquet")), schema).set_index("column0").sort_index()
        positive = (expected_rows["outcome"] == "click").to_numpy()
        assert actual.index.tolist() == expected_rows.index.tolist()
        assert (actual["label"] == positive).all()
        if split == "train":
            logs = np.log1p(expected_rows["item_price"].to_numpy())
            assert actual["item_price_value"].to_numpy() == pytest.approx(
                (logs - logs.mean()) / logs.std(ddof=1), abs=1e-5
            )
            # Three countries, three segments of users.
            assert set(zip(actual["user_country"], actual["user_segment"], strict=True)) <= {
                (code, code) for code in (2, 3, 4)
            }


def by_spark(spark: SparkSession, data: pd.DataFrame, folder: Path, form: str) -> None:
    """A table of today's names, other ones than its files have, from which rows are deleted."""
    times = data.astype({"ts": "datetime64[us, UTC]"})
    frame = spark.createDataFrame(pa.Table.from_pandas(times, preserve_index=False))
    frame = frame.selectExpr("*", "named_struct('price', item_price, 'slot', slot) AS shown").drop("item_price", "slot")
    table = f"delta.`{folder}`" if form == "delta" else f"by_hand.`{folder.parent.name}`.`{folder.name}`"
    frame.coalesce(1).createOrReplaceTempView("rows")
    mapped = "'delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'true', "
    mapped += "'delta.enableChangeDataFeed' = 'false'"
    properties = mapped if form == "delta" else "'write.delete.mode' = 'merge-on-read'"
    spark.sql(f"CREATE TABLE {table} USING {form} TBLPROPERTIES ({properties}) AS SELECT * FROM rows")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN country TO user_land")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN shown.price TO item_cost")
    spark.sql(f"ALTER TABLE {table} DROP COLUMN referrer_hash")
    spark.sql(f"DELETE FROM {table} WHERE impression_id LIKE '%7'")


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_a_table_with_other_names_than_its_files(spark: SparkSession, ws: Workspace, tmp_path: Path, form: str) -> None:
    if form == "iceberg" and not iceberg_jars():
        pytest.skip("Iceberg's jar is not here: run `make iceberg`")
    data, folder = clicks(1_200, 3).assign(ts=lambda d: pd.to_datetime(d["ts"])), tmp_path / "events"
    # A name of its own: Spark keeps a catalog's settings as long as the session.
    catalog = {
        "spark.sql.catalog.by_hand": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.by_hand.type": "hadoop",
        "spark.sql.catalog.by_hand.warehouse": str(tmp_path.parent),
    }
    with spark_settings(spark, catalog if form == "iceberg" else {}):
        by_spark(spark, data, folder, form)
    write_pipeline(str(folder), tmp_path / "p.yaml", None, Named(), force=False)
    assert "Rows that are deleted are among those looked at" in (tmp_path / "p.yaml").read_text()
    spec = load_spec(tmp_path / "p.yaml", ["features.min_row_groups=1"])
    assert spec.source.model_dump(exclude_defaults=True) == {"format": form, "path": str(folder)}
    declared = {c.name: c.path for c in spec.table.columns}
    assert {"user_land": None, "shown_item_cost": "shown.item_cost"}.items() <= declared.items()
    assert "referrer_hash" not in declared
    assert spec.ds is not None
    run_stage(load_stage("ingest"), spec, ws, spec.ds)
    manifest = run_stage(load_stage("features"), spec, ws, spec.ds).manifest
    day = data["ts"][~data["impression_id"].str.endswith("7")].dt.strftime("%Y-%m-%d")
    assert manifest.rows == {"train": int((day < spec.ds).sum()), "valid": int((day == spec.ds).sum())}


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_table_is_read_where_it_is(spark: SparkSession, ws: Workspace, tmp_path: Path, form: str) -> None:
    data = clicks(1_200, 3).assign(ts=lambda d: pd.to_datetime(d["ts"]))
    folder = tmp_path / "events"
    folder.mkdir()
    for k in range(3):
        rows = data.iloc[k * 400 : (k + 1) * 400]
        if form == "delta":
            table = pa.Table.from_pandas(rows.astype({"ts": "datetime64[us, UTC]"}), preserve_index=False)
            write_deltalake(str(folder), table, mode="append")
        else:
            rows.to_parquet(folder / f"{k}.parquet", index=False, coerce_timestamps="us")
    write_pipeline(str(folder), tmp_path / "p.yaml", None, Named(), force=False)
    spec = load_spec(tmp_path / "p.yaml", ["features.min_row_groups=1"])
    assert spec.ds == "2026-03-03"
    run_stage(load_stage("ingest"), spec, ws, spec.ds)
    manifest = run_stage(load_stage("features"), spec, ws, spec.ds).manifest
    day = data["ts"].dt.strftime("%Y-%m-%d")
    assert manifest.rows == {"train": int((day < spec.ds).sum()), "valid": int((day == spec.ds).sum())}
    assert not (ws.table(spec.pipeline, "events") / "_delta_log").is_dir(), "rows were copied"
