"""Delta tables as Spark writes them, read without Spark: deletion vectors and every kind of checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Manifest
from headrace.storage import local
from headrace.workspace import Workspace
from tests.spark.test_features_stage import DS, clicks, dataset, land, make_clicks, read
from tests.spark.test_features_stage import run as build


def rows(spark: SparkSession, path: Path, version: int) -> int:
    return spark.read.format("delta").option("versionAsOf", version).load(str(path)).count()


def create(spark: SparkSession, path: Path, **properties: str) -> None:
    writer = spark.range(40).selectExpr("id", "concat('d', id % 2) AS ds").repartition(2, "ds").write.format("delta")
    for name, value in properties.items():
        writer = writer.option(f"delta.{name}", value)
    writer.partitionBy("ds").save(str(path))


def test_deletion_vectors(spark: SparkSession, tmp_path: Path) -> None:
    create(spark, tmp_path, enableDeletionVectors="true")
    spark.sql(f"DELETE FROM delta.`{tmp_path}` WHERE id < 3")
    spark.sql(f"DELETE FROM delta.`{tmp_path}` WHERE id = 11")
    spark.range(40, 42).selectExpr("id", "'d0' AS ds").write.format("delta").mode("append").save(str(tmp_path))
    log = DeltaLog(local(tmp_path))
    assert log.version == 3
    for version in range(4):
        files = log.files(version)
        assert files is not None
        assert sum(f.rows or 0 for f in files) == rows(spark, tmp_path, version)
    # The rows are still in the files: nobody may take those as they are.
    files = log.files(3)
    assert files is not None
    assert sum(pq.read_metadata(f.path).num_rows for f in files) == 42
    assert sum(f.deleted for f in files) == 4
    assert log.plain_files(0) is not None
    assert log.plain_files(3) is None
    assert [c.operation for c in log.commits()] == ["WRITE", "DELETE", "DELETE", "WRITE"]
    # Written anew, they may.
    spark.sql(f"REORG TABLE delta.`{tmp_path}` APPLY (PURGE)")
    plain = log.plain_files(4)
    assert plain is not None
    assert sum(pq.read_metadata(f.path).num_rows for f in plain) == 38


def test_a_dataset_has_no_rows_that_a_deletion_vector_marks(spark: SparkSession, ws: Workspace) -> None:
    """Not even through the Arrow engine, which reads data files itself."""
    spec, events = clicks(), make_clicks(600)
    land(spark, ws, spec, events)
    path = ws.table(spec.pipeline, "events")
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE user_country = 'ländle3'")
    manifest = Manifest.load(ws.manifest(spec.pipeline, DS, "ingest"))
    assert manifest is not None
    version = str(DeltaLog(path).version)
    outputs = (manifest.outputs[0].model_copy(update={"version": version}), manifest.outputs[1])
    manifest.model_copy(update={"outputs": outputs}).save(ws.manifest(spec.pipeline, DS, "ingest"))
    folder = dataset(ws, build(spec, ws).manifest)
    found = {e for split in ("train", "valid") for e in read(folder, split)["event_id"]}
    deleted = set(events["event_id"][events["user_country"] == "ländle3"])
    assert deleted
    assert not found & deleted
    assert len(found) > len(events) / 2


@pytest.mark.parametrize("kind", ["classic", "parts", "v2 parquet", "v2 json"])
def test_checkpoints(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    properties = {"checkpointPolicy": "v2"} if kind.startswith("v2") else {}
    create(spark, tmp_path, enableDeletionVectors="true", **properties)
    spark.sql(f"DELETE FROM delta.`{tmp_path}` WHERE id < 3")
    settings = {
        "parts": ("spark.databricks.delta.checkpoint.partSize", "1"),
        "v2 json": ("spark.databricks.delta.checkpointV2.topLevelFileFormat", "json"),
        "v2 parquet": ("spark.databricks.delta.checkpointV2.topLevelFileFormat", "parquet"),
    }
    name, value = settings.get(kind, ("spark.databricks.delta.checkpoint.partSize", "1000"))
    spark.conf.set(name, value)
    jvm: Any = spark._jvm
    try:
        jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(tmp_path)).checkpoint()
    finally:
        spark.conf.unset(name)
    names = sorted(
        p.name.split(".", 1)[1] for p in (tmp_path / "_delta_log").glob("*.checkpoint.*") if p.suffix != ".crc"
    )
    assert (len(names) > 1) == (kind == "parts"), names
    assert names[0].endswith(".json") == (kind == "v2 json")
    assert (tmp_path / "_delta_log" / "_sidecars").is_dir() == kind.startswith("v2")
    spark.range(40, 42).selectExpr("id", "'d0' AS ds").write.format("delta").mode("append").save(str(tmp_path))
    log = DeltaLog(local(tmp_path))
    before = log.files(2)
    # The commits before a checkpoint may be gone.
    for version in (0, 1):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    files = log.files(2)
    assert files is not None
    assert before is not None
    assert sorted(str(f) for f in files) == sorted(str(f) for f in before)
    assert sum(f.rows or 0 for f in files) == rows(spark, tmp_path, 2) == 39
    assert log.columns() == {"id": "long", "ds": "string"}


def test_column_mapping_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    mapped = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    spark.sql(f"CREATE TABLE delta.`{tmp_path}` (id bigint) USING delta {mapped}")
    with pytest.raises(UserError, match=r"maps its columns' names \(delta\.columnMapping\.mode = name\)"):
        DeltaLog(local(tmp_path)).files(0)
