"""A Delta table of another writer, delta-rs: read by ingest and features as by Spark and by delta-rs itself."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local
from tests.source_table_support import D3, arrow_rows, dataset, expected, ids, ingest, make_rows, make_spec

SELECTED = "SELECT id, ts, price, click FROM events"


def by_delta_rs(path: Path, version: int) -> pd.DataFrame:
    batches = QueryBuilder().register("events", DeltaTable(path, version=version)).execute(SELECTED)
    return pa.table(batches.read_all()).to_pandas().sort_values("id", ignore_index=True)


def by_spark(spark: SparkSession, path: Path, version: int) -> pd.DataFrame:
    spark.read.format("delta").option("versionAsOf", version).load(str(path)).createOrReplaceTempView("events")
    return spark.sql(SELECTED).toArrow().to_pandas().sort_values("id", ignore_index=True)


def test_a_table_of_delta_rs(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rows = arrow_rows(make_rows())
    write_deltalake(path, rows.slice(0, 150), partition_by=["dt"])
    write_deltalake(path, rows.slice(150), mode="append")
    table = DeltaTable(path)
    table.delete("id % 11 = 0")
    table.update(updates={"price": "price + 100"}, predicate="id IN (7, 8, 9)")
    table.create_checkpoint()
    # Nothing but the checkpoint has the first versions.
    for version in range(3):
        (path / "_delta_log" / f"{version:020d}.json").unlink()
    source = {"format": "delta", "path": str(path), "day": {"partition": "dt"}}
    workflow = [{"columns": ["price"], "ops": []}, {"columns": ["user", "item"], "ops": ["categorify"]}]
    spec = make_spec(source, {}, {"workflow": workflow})

    def check(version: int) -> None:
        seen = by_delta_rs(path, version)
        pd.testing.assert_frame_equal(by_spark(spark, path, version), seen, check_dtype=False)
        manifest = ingest(spec, ws, D3)
        assert (manifest.outputs[0].version, manifest.rows["kept"]) == (str(version), len(seen))
        frames = dataset(spec, ws, D3)
        assert ids(frames) == expected(seen)
        every = pd.concat(frames.values())[["id", "price", "click"]].sort_values("id", ignore_index=True)
        expected_rows = seen[seen["id"].isin(every["id"])][["id", "price", "click"]].reset_index(drop=True)
        pd.testing.assert_frame_equal(every, expected_rows, check_dtype=False)

    check(3)
    assert DeltaLog(local(path)).plain_files(3) is not None
    # Rows that Spark marks as deleted in files of delta-rs, which reads such marks, too.
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id % 7 = 3")
    assert DeltaLog(local(path)).plain_files(5) is None
    check(5)
