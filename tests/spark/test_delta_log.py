"""Delta's log without Spark: what Spark reads of it, and names of columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bench.simulated_days import day, write_rows
from headrace.config.schema import column
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.compact import crowded, join_files
from headrace.lake.delta.data_files import DataFileWriter, WrittenFile, ddl_fields
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.retention import remove_days_before, unused_files, unused_log_files
from headrace.lake.delta.transaction import Transaction, claim, create_table
from headrace.lake.delta.with_spark import save_delta
from headrace.lake.landing.load import commit_files
from headrace.stage.manifest import Manifest
from headrace.storage import Fence, LeaseLost, local
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


def test_small_files_of_a_table_that_only_grows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = local(tmp_path)
    create(spark, tmp_path, appendOnly="true")
    for n in range(2):
        spark.range(40 + n, 41 + n).selectExpr("id", "'d0' AS ds").write.format("delta").mode("append").save(str(table))
    expected_rows = {(r["id"], r["ds"]) for r in spark.read.format("delta").load(str(table)).collect()}
    days, _ = crowded(table, 2, 1 << 20)
    assert "d0" in days
    # Another one adds meanwhile: files that are there stay.
    log, fence, real = DeltaLog(table), Fence("lease", 1), Transaction.join

    def later(self: Transaction, *arguments: Any) -> int:
        spark.range(50, 51).selectExpr("id", "'d0' AS ds").write.format("delta").mode("append").save(str(table))
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "join", later)
        join_files(table, ["d0"], 1 << 20, fence)
    version = log.version
    assert version is not None
    expected_rows |= {(50, "d0")}
    assert {(r["id"], r["ds"]) for r in spark.read.format("delta").load(str(table)).collect()} == expected_rows
    join_files(table, crowded(table, 2, 1 << 20)[0], 1 << 20, fence)
    assert crowded(table, 2, 1 << 20) == ([], 0)
    frame = spark.read.format("delta").load(str(table))
    assert {(r["id"], r["ds"]) for r in frame.collect()} == expected_rows
    # Spark takes the counts of these from the log's statistics.
    assert frame.where("ds = 'd0'").agg({"id": "min"}).collect()[0][0] == min(
        i for i, ds in expected_rows if ds == "d0"
    )
    assert (frame.count(), frame.where("id >= 50").count()) == (len(expected_rows), 1)
    assert all(not action["add"]["dataChange"] for action in log.actions(version) if "add" in action)
    # Who was paused names no file after a later holder's commit, which may have removed what nothing named.
    spark.range(60, 61).selectExpr("id", "'d0' AS ds").write.format("delta").mode("append").save(str(table))

    def overtaken(self: Transaction, *arguments: Any) -> int:
        claim(table, Fence("lease", 2))
        return real(self, *arguments)

    monkeypatch.setattr(Transaction, "join", overtaken)
    newest = log.version
    assert newest is not None
    with pytest.raises(LeaseLost):
        join_files(table, ["d0"], 1 << 20, fence)
    assert (log.version, log.files(newest + 1)) == (newest + 1, log.files(newest))


@pytest.mark.parametrize("vectors", ["false", "true"])
def test_files_that_no_kept_version_needs(spark: SparkSession, tmp_path: Path, vectors: str) -> None:
    """Spark reads the newest and the pinned versions after they are gone, and no other one."""

    def rows_at(version: int) -> list[tuple[int, str]]:
        frame = spark.read.format("delta").option("versionAsOf", version).load(str(tmp_path))
        return sorted((r["id"], r["ds"]) for r in frame.collect())

    table = local(tmp_path)
    create(spark, tmp_path, enableDeletionVectors=vectors, enableChangeDataFeed="true", checkpointInterval="2")
    for n in range(4):
        spark.range(40 + n, 41 + n).selectExpr("id", "'d0' AS ds").write.format("delta").mode("append").save(str(table))
    spark.sql(f"DELETE FROM delta.`{tmp_path}` WHERE id < 3")
    newest = DeltaLog(table).version
    assert newest == 5
    days, small = crowded(table, 4, 1 << 20)
    assert (days, small > 0) == (["d0"], True)
    join_files(table, days, 1 << 20, None)
    assert crowded(table, 2, 1 << 20) == ([], 0)
    assert remove_days_before(table, "d1") == 7
    rows_before = {version: rows_at(version) for version in range(8)}
    unused = unused_files(table, {3}, None, 2**62)
    assert unused
    for file in [*unused, *unused_log_files(table, {3}, None, 2**62)]:
        file.remove()
    spark.catalog.clearCache()
    assert [rows_at(3), rows_at(7)] == [rows_before[3], rows_before[7]]
    assert {ds for _, ds in rows_before[7]} == {"d1"}
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|FileNotFound|does not exist"):
        rows_at(6)
    assert unused_files(table, {3}, None, 2**62) == []
    # Of a pinned version, too, days go that the table does not keep.
    assert {f.parent.name for f in unused_files(table, {3}, "d1", 2**62)} <= {"ds=d0", tmp_path.name}
    # The log alone tells both versions after its checkpoints are gone.
    assert DeltaLog(table).state(3) is not None


def test_spark_reads_every_kept_version_after_files_of_the_log_went(spark: SparkSession, tmp_path: Path) -> None:
    """A table that keeps 24 days, written by Spark and by us, with two commits a day."""
    table, retained = local(tmp_path), 24
    versions: dict[int, int] = {}
    for n in range(60):
        if n % 6 == 5:
            rows = spark.range(n, n + 1).selectExpr("id AS user_id", f"'{day(n)}' AS ds").coalesce(1)
            rows.write.format("delta").mode("append").save(str(table))
            version = DeltaLog(table).version
        else:
            version = write_rows(table, day(n), [n])
        assert version is not None
        versions[n] = version
        remove_days_before(table, day(n - retained + 1))
        if n < 40:
            continue
        for file in unused_log_files(
            table, {v for m, v in versions.items() if m > n - retained}, day(n - retained + 1), 2**62
        ):
            file.remove()
    log = DeltaLog(table)
    assert min(log.versions()) > 40
    spark.catalog.clearCache()
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    for n in range(60 - retained, 60):
        frame = spark.read.format("delta").option("versionAsOf", versions[n]).load(str(table)).select("ds")
        days = {f.split("ds=")[1][:10] for f in frame.inputFiles()}
        assert days == {day(m) for m in range(n - retained, n + 1)}, n
    newest = spark.read.format("delta").load(str(table))
    assert sorted(r["user_id"] for r in newest.collect()) == list(range(60 - retained, 60))
    with pytest.raises(Exception, match=r"VERSION|version|recreate"):
        spark.read.format("delta").option("versionAsOf", 1).load(str(table)).count()


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
    event_ids = {e for split in ("train", "valid") for e in read(folder, split)["event_id"]}
    deleted = set(events["event_id"][events["user_country"] == "ländle3"])
    assert deleted
    assert not event_ids & deleted
    assert len(event_ids) > len(events) / 2


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
    files_before = log.files(2)
    # The commits before a checkpoint may be gone.
    for version in (0, 1):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    files = log.files(2)
    assert files is not None
    assert files_before is not None
    assert sorted(str(f) for f in files) == sorted(str(f) for f in files_before)
    assert sum(f.rows or 0 for f in files) == rows(spark, tmp_path, 2) == 39
    assert log.columns() == {"id": "long", "ds": "string"}


def test_column_mapping_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    mapped = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    spark.sql(f"CREATE TABLE delta.`{tmp_path}` (id bigint) USING delta {mapped}")
    with pytest.raises(UserError, match=r"maps its columns' names \(delta\.columnMapping\.mode = name\)"):
        DeltaLog(local(tmp_path)).files(0)


def test_spark_reads_what_is_committed_without_it(spark: SparkSession, tmp_path: Path) -> None:
    """At every version, with its history and changes; and commits after it, deletion vectors and a checkpoint too."""
    folder = local(tmp_path / "table")
    fields = [f.jsonValue() for f in ddl_fields("id bigint, tags array<string>, ds string")]
    create_table(folder, fields, ["ds"])
    schema = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.field("element", pa.string())))])

    def write(ds: str, first: int, count: int) -> WrittenFile:
        writer = DataFileWriter(folder, ds, schema, "snappy")
        values = list(range(first, first + count))
        writer.add(pa.table({"id": values, "tags": [[str(v)] for v in values]}, schema=schema))
        file = writer.close()
        assert file is not None
        return file

    def commit(days: list[str], files: list[WrittenFile], columns: str = "") -> None:
        commit_files(spark, folder, days, files, f"of {','.join(days)}", columns)

    def read(version: int) -> list[tuple[int, str]]:
        frame = spark.read.format("delta").option("versionAsOf", version).load(str(folder))
        return sorted((r["id"], r["ds"]) for r in frame.collect())

    d1, d2 = "2026-03-01", "2026-03-02"
    commit([d1, d2], [write(d1, 0, 3), write(d2, 10, 2)])
    commit([d1], [write(d1, 20, 2)])
    commit([d2], [])
    expected = [[], [(0, d1), (1, d1), (2, d1), (10, d2), (11, d2)], [(10, d2), (11, d2), (20, d1), (21, d1)]]
    expected.append([(20, d1), (21, d1)])
    assert [read(v) for v in range(4)] == expected
    table = f"delta.`{folder}`"
    history = spark.sql(f"DESCRIBE HISTORY {table}").collect()
    assert [(r["version"], r["operation"], r["userMetadata"]) for r in history] == [
        (3, "WRITE", f"of {d2}"),
        (2, "WRITE", f"of {d1}"),
        (1, "WRITE", f"of {d1},{d2}"),
        (0, "CREATE TABLE", None),
    ]
    assert history[1]["operationParameters"] == {"mode": "Overwrite", "predicate": f"ds IN ('{d1}')"}
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 2)
    changes = feed.option("endingVersion", 2).load(str(folder)).groupBy("_change_type").count().collect()
    assert {r["_change_type"]: r["count"] for r in changes} == {"delete": 3, "insert": 2}
    # The same settings as a table that Spark makes with them.
    properties = spark.sql(f"SHOW TBLPROPERTIES {table}").collect()
    assert {r["key"]: r["value"] for r in properties if r["key"].startswith("delta.enable")} == {
        "delta.enableChangeDataFeed": "true",
        "delta.enableDeletionVectors": "false",
    }
    # Others write, and the log goes on.
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    commit([d2], [write(d2, 30, 4)])
    spark.sql(f"DELETE FROM {table} WHERE id = 31")
    spark.sql(f"ALTER TABLE {table} ADD CONSTRAINT few CHECK (id < 100)")
    with pytest.raises(UserError, match=r"1 rows of 2026-03-01 break the constraint 'few' of .*nothing of the day"):
        commit([d1], [write(d1, 99, 2)])
    for _ in range(3):
        commit([d1], [write(d1, 50, 2)])
    assert [p.name[:20] for p in sorted((tmp_path / "table" / "_delta_log").glob("*.checkpoint.parquet"))] == [
        f"{10:020d}"
    ]
    # From the checkpoint alone: also the file with a deletion vector is removed, and a column comes.
    for version in range(10):
        (tmp_path / "table" / "_delta_log" / f"{version:020d}.json").unlink()
    assert read(10) == [(30, d2), (32, d2), (33, d2), (50, d1), (51, d1)]
    commit([d2], [write(d2, 60, 1)], "id bigint, tags array<string>, color string")
    assert read(11) == [(50, d1), (51, d1), (60, d2)]
    assert spark.read.format("delta").load(str(folder)).columns == ["id", "tags", "ds", "color"]
    assert DeltaLog(folder).columns()["color"] == "string"
    spark.sql(f"OPTIMIZE {table}")
    assert [(r["id"], r["tags"]) for r in spark.read.format("delta").load(str(folder)).orderBy("id").collect()] == [
        (50, ["50"]),
        (51, ["51"]),
        (60, ["60"]),
    ]


NAMES = ['the "best" `item` 100%', "a b", "größe;cm, it's", "{x} (y)=z", "tab\tand\nline", "service.name", "select"]


def test_days_of_hostile_names(spark: SparkSession, tmp_path: Path) -> None:
    table = local(tmp_path / "scores")
    for ds, rows in [("2026-01-01", 5), ("2026-01-02", 7), ("2026-01-01", 3)]:
        values = [F.col("id").alias(name) for name in NAMES]
        frame = spark.range(rows).select(F.lit(ds).alias("ds"), *values)
        writer = frame.write.format("delta").mode("overwrite").partitionBy("ds").option("mergeSchema", "true")
        save_delta(writer.option("replaceWhere", f"ds = '{ds}'"), table, None, frame.schema)
        assert DeltaLog(table).columns().keys() == {"ds", *NAMES}
    stored = spark.read.format("delta").load(str(table))
    assert sorted(stored.groupBy("ds").agg(F.sum(column(NAMES[0]))).collect()) == [
        ("2026-01-01", 3),
        ("2026-01-02", 21),
    ]
    assert stored.where(column(NAMES[4]) == 2).count() == 2
    spark.sql(f"DELETE FROM delta.`{table}` WHERE `{NAMES[3]}` = 1")
    assert spark.read.format("delta").load(str(table)).where(column(NAMES[1]) == 1).count() == 0
    assert len(DeltaLog(table).files(DeltaLog(table).version) or []) >= 2


def test_a_column_without_a_name(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(1).select(F.lit("2026-01-01").alias("ds"), F.col("id").alias(""))
    writer = frame.write.format("delta").mode("overwrite").partitionBy("ds")
    with pytest.raises(UserError, match="a Delta table cannot have a column ''"):
        save_delta(writer, local(tmp_path / "scores"), None, frame.schema)
