"""Checkpoints as Spark writes them, of every kind, without the values of some persons: Spark reads them as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.redact import exactly, redact_log
from headrace.storage import local

#: The smallest of one file, the largest of another.
FORGOTTEN = [1001, 9999]
VALUES = {"user_id": exactly(frozenset(map(str, FORGOTTEN)))}
DAYS = {"d0": [1001, 1005, 1006], "d1": [2001, 2002, 9999], "d2": [3001, 3002]}
SETTINGS = {
    "parts": {"spark.databricks.delta.checkpoint.partSize": "1"},
    "v2 json": {"spark.databricks.delta.checkpointV2.topLevelFileFormat": "json"},
    "v2 parquet": {"spark.databricks.delta.checkpointV2.topLevelFileFormat": "parquet"},
}


def without_forgotten(rows: pa.Table) -> tuple[pa.Table, int]:
    remaining = rows.filter(pc.invert(pc.is_in(rows["user_id"], pa.array(FORGOTTEN, pa.int64()))))
    return remaining, rows.num_rows - remaining.num_rows


def checkpoint_texts(log: Path) -> str:
    """All that checkpoints say of files."""
    texts = [f.read_text() for f in log.rglob("*.checkpoint.*.json")]
    for file in log.rglob("*.parquet"):
        rows = pq.ParquetFile(file, coerce_int96_timestamp_unit="us").read()
        texts.append(str([a for a in rows["add"].to_pylist() if a] if "add" in rows.column_names else ""))
    return "".join(texts)


def instant(seconds: object) -> str:
    """An expression of Spark's: so many seconds after a time."""
    return f"timestamp'2026-03-01 10:00:00' + make_interval(0, 0, 0, 0, 0, 0, {seconds})"


@pytest.mark.parametrize("kind", ["classic", "parts", "v2 parquet", "v2 json"])
def test_every_kind(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    jvm: Any = spark._jvm
    delta, path, log = jvm.org.apache.spark.sql.delta.DeltaLog, str(tmp_path), tmp_path / "_delta_log"
    policy = "v2" if kind.startswith("v2") else "classic"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (user_id bigint, at timestamp, ds string) USING delta PARTITIONED BY (ds) "
        f"TBLPROPERTIES ('delta.checkpointPolicy' = '{policy}', 'delta.checkpoint.writeStatsAsStruct' = 'true')"
    )
    for ds, users in DAYS.items():
        rows = spark.createDataFrame([(u,) for u in users], "user_id bigint").coalesce(1)
        rows = rows.selectExpr("user_id", f"{instant('user_id')} AS at")
        rows.selectExpr("*", f"'{ds}' AS ds").write.format("delta").mode("append").save(path)
    for name, value in SETTINGS.get(kind, {}).items():
        spark.conf.set(name, value)
    try:
        delta.forTable(spark._jsparkSession, path).checkpoint()
    finally:
        for name in SETTINGS.get(kind, {}):
            spark.conf.unset(name)
    assert (log / "_sidecars").is_dir() == (policy == "v2")
    # The checkpoint alone tells of the file of d0.
    spark.sql(f"DELETE FROM delta.`{path}` WHERE ds = 'd0'")
    for version in range(3):
        (log / f"{version:020d}.json").unlink()
    assert all(str(user) in checkpoint_texts(log) for user in FORGOTTEN)
    assert redact_log(local(tmp_path), VALUES, delete=False) > 0

    def answers() -> dict[str, list[int]]:
        """Ask Spark, which skips files by what statistics say."""
        delta.clearCache()
        newest = spark.read.format("delta").load(path)
        return {condition: sorted(r["user_id"] for r in newest.where(condition).collect()) for condition in conditions}

    conditions = {
        "true": [2001, 2002, 3001, 3002],
        "user_id > 3001": [3002],
        f"at < {instant(2002)}": [2001],
        f"at >= {instant(3002)}": [3002],
    }
    assert erase(local(tmp_path), Change(("user_id",), without_forgotten), "request", delete=True).left == []
    assert answers() == conditions
    redact_log(local(tmp_path), VALUES, delete=True)
    assert not any(str(user) in checkpoint_texts(log) for user in FORGOTTEN)
    assert redact_log(local(tmp_path), VALUES, delete=False) == 0

    # To us the pinned version stands, without their rows.
    files = DeltaLog(local(tmp_path)).plain_files(3) or []
    users = sorted(u for f in files for u in pq.ParquetFile(f.path).read()["user_id"].to_pylist())
    assert users == [1005, 1006, 2001, 2002, 3001, 3002]
    # Spark reads the newest one as before, and skips files by what others' statistics say; so of the older one.
    assert answers() == conditions
    newest = spark.read.format("delta").load(path)
    assert len(newest.where("user_id > 3001").inputFiles()) == 1
    assert len(spark.read.format("delta").option("versionAsOf", 3).load(path).inputFiles()) == 3
