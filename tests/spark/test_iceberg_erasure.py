"""Persons who are erased from a warehouse of Iceberg tables: rows that delete files hide, erasures that were killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import spark_settings
from headrace.publish.opening import open_target
from headrace.publish.tables.iceberg import IcebergErasure, IcebergTarget, SnapshotExpiry
from headrace.publish.tables.iceberg_fencing import change, load_table
from headrace.storage import local
from tests.storage_support import Killed
from tests.warehouses import Warehouses

DAYS = ("2026-01-10", "2026-01-11")
#: Of more than 32 bits: Py4J makes smaller ones another type than the column's.
USERS = [2**40 + n for n in range(30)]
SCHEMA = "ds string, user_id bigint, item_id bigint, rank int, score float, model_version string"
MODE = "write.delete.mode"


@pytest.fixture
def target(spark: SparkSession, tmp_path: Path) -> Iterator[IcebergTarget]:
    """Two days of scores; DELETE hides rows of both tables in live files."""
    places = Warehouses(tmp_path)
    if "iceberg" not in places.settings:
        pytest.skip("Iceberg's jar is not here: make iceberg")
    spec = load_spec("clicks", ["score.top_k=4", *places.overrides("iceberg")])
    with spark_settings(spark, places.properties), open_target(spec, Workspace(tmp_path / "home")) as opened:
        assert isinstance(opened, IcebergTarget)
        for ds in DAYS:
            df = spark.createDataFrame([(ds, u, 7, 1, 0.5, "m") for u in USERS], SCHEMA).coalesce(1)
            opened.create(df.dtypes)
            with opened.stage(df, ds, ds) as staged:
                opened.swap(staged, "s", [])
        for table in (opened.table, opened.current):
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('format-version' = '2', '{MODE}' = 'merge-on-read')")
        yield opened


def on_disk(folder: Path) -> set[int]:
    """The users of all Parquet files, whether a table names them or not."""
    files = [pq.ParquetFile(f).read() for f in (folder / "iceberg").rglob("*.parquet")]
    return {user for rows in files if "user_id" in rows.column_names for user in rows["user_id"].to_pylist()}


def users(spark: SparkSession, table: str) -> set[int]:
    return {row[0] for row in spark.sql(f"SELECT user_id FROM {table}").collect()}


def delete_by_value(spark: SparkSession, name: str, user: int) -> None:
    """Delete as writers do that know no positions (Flink): a delete file says which values are gone."""
    jvm: Any = spark._jvm
    gateway: Any = spark.sparkContext._gateway
    table = load_table(spark, name)
    schema = table.schema().select(["user_id"])
    ids = gateway.new_array(jvm.int, 1)
    ids[0] = schema.findField("user_id").fieldId()
    spec = jvm.org.apache.iceberg.PartitionSpec.unpartitioned()
    factory = jvm.org.apache.iceberg.data.GenericAppenderFactory(table.schema(), spec, ids, schema, None)
    file = table.io().newOutputFile(table.locationProvider().newDataLocation(f"by-value-{user}.parquet"))
    out = jvm.org.apache.iceberg.encryption.EncryptedFiles.plainAsEncryptedOutput(file)
    writer = factory.newEqDeleteWriter(out, jvm.org.apache.iceberg.FileFormat.PARQUET, None)
    row = jvm.org.apache.iceberg.data.GenericRecord.create(schema)
    row.setField("user_id", user)
    writer.write(row)
    writer.close()
    table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()


def test_rows_that_delete_files_hide(spark: SparkSession, tmp_path: Path, target: IcebergTarget) -> None:
    """Rows that others have deleted in their way are seen by no reader, and are in live files."""
    first, hidden, by_value, deleted = USERS[20], USERS[3], USERS[5], USERS[6]
    assert target.erase("user_id", [first]) == ""  # no older snapshots from here on
    spark.sql(f"DELETE FROM {target.table} WHERE user_id = {hidden}")
    spark.sql(f"DELETE FROM {target.current} WHERE user_id = {hidden}")
    assert target.rows_with("user_id", [hidden]) == {}
    delete_by_value(spark, target.current, by_value)
    assert target.leftovers("user_id", [hidden]) == 3  # files of two days, and of the newest one's copy
    # Rows that nobody has deleted yet are in the former; the file that says who is gone has the value.
    assert target.leftovers("user_id", [by_value]) == 4
    assert target.erase("user_id", [hidden, by_value]) == ""
    assert target.leftovers("user_id", [hidden, by_value]) == 0
    remaining_users = {*USERS} - {first, hidden, by_value}
    assert on_disk(tmp_path) == remaining_users
    for table in (target.table, target.current):
        assert users(spark, table) == remaining_users
        assert spark.sql(f"SHOW TBLPROPERTIES {table} ('{MODE}')").collect()[0][1] == "merge-on-read"
    # What others hide has not to go.
    spark.sql(f"DELETE FROM {target.table} WHERE user_id = {deleted}")
    assert target.leftovers("user_id", [hidden, by_value]) == 0


def test_killed_at_each_step(
    spark: SparkSession, tmp_path: Path, target: IcebergTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has ended something is said to be left, whether a snapshot names the files or not."""

    def fail_before(_: Callable[..., Any], *args: Any) -> None:
        pass

    def fail_after(real: Callable[..., Any], *args: Any) -> None:
        real(*args)

    def fail_halfway(real: Callable[..., Any], self: SnapshotExpiry, io: Any, paths: list[str]) -> None:
        real(self, io, paths[:1])

    kills: list[tuple[type, str, Callable[..., None]]] = [
        (IcebergErasure, "_rewrite", fail_before),
        (IcebergErasure, "_write_manifests", fail_after),
        (SnapshotExpiry, "_expire", fail_after),
        (SnapshotExpiry, "_delete", fail_halfway),
    ]
    forgotten = [USERS[0], USERS[7], USERS[29]]
    spark.sql(f"DROP TABLE {target.current} PURGE")
    for owner, name, fault in kills:
        real = getattr(owner, name)

        def kill(self: Any, *args: Any, fault: Any = fault, real: Any = real) -> None:
            fault(real, self, *args)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, kill)
            with pytest.raises(Killed):
                target.erase("user_id", forgotten)
        assert target.rows_with("user_id", forgotten) == {}
        assert {*forgotten} <= on_disk(tmp_path), name
        assert target.leftovers("user_id", forgotten) > 0, name
    assert target.erase("user_id", forgotten) == ""
    assert target.leftovers("user_id", forgotten) == 0
    assert on_disk(tmp_path) == {*USERS} - {*forgotten}
    assert users(spark, target.table) == {*USERS} - {*forgotten}
    assert target.rows_by_day() == dict.fromkeys(DAYS, 27)
    assert not [f for f in target.expired.entries() if f.is_file()]


def append_without_ids(spark: SparkSession, name: str, rows: pa.Table, file: Path) -> None:
    """Add files of others to a table as they are."""
    pq.write_table(rows, file)
    jvm: Any = spark._jvm
    added = jvm.org.apache.iceberg.DataFiles.builder(jvm.org.apache.iceberg.PartitionSpec.unpartitioned())
    added = added.withPath(str(file)).withFormat("parquet").withFileSizeInBytes(file.stat().st_size)
    load_table(spark, name).newAppend().appendFile(added.withRecordCount(rows.num_rows).build()).commit()


@pytest.mark.parametrize("kind", ["special characters", "renamed", "dropped", "without ids"])
def test_columns_of_which_files_have_other_names(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    places = Warehouses(tmp_path)
    if "iceberg" not in places.settings:
        pytest.skip("Iceberg's jar is not here: make iceberg")
    table = f"{places.settings['iceberg'][0].removeprefix('catalog=')}.served.seen"
    with spark_settings(spark, places.properties):
        first = "visitor" if kind == "renamed" else "user id"
        spark.sql(f"CREATE TABLE {table} (`{first}` bigint, n int) USING iceberg")
        if kind == "without ids":
            rows = pa.table({"user id": [1, 2], "n": pa.array([1, 2], pa.int32())})
            append_without_ids(spark, table, rows, tmp_path / "iceberg" / "added.parquet")
        else:
            spark.sql(f"INSERT INTO {table} SELECT id, 0 FROM range(1, 3, 1, 1)")
        if kind == "dropped":  # its values are in a live file, where no reader sees them
            spark.sql(f"ALTER TABLE {table} DROP COLUMN `user id`")
            spark.sql(f"ALTER TABLE {table} ADD COLUMN `user id` bigint")
        elif kind == "renamed":
            spark.sql(f"ALTER TABLE {table} RENAME COLUMN visitor TO `user id`")
        spark.sql(f"DELETE FROM {table} WHERE `user id` = 1")
        record, unfenced = local(tmp_path / "expired.json"), partial(change, spark, table, table, None)
        erasure = IcebergErasure(spark, table, "user id", [1], record, unfenced)
        assert erasure.files() == 1
        assert erasure.run() == ""
        assert erasure.files() == 0
        assert spark.table(table).count() == (2 if kind == "dropped" else 1)
    remaining_tables = [pq.read_table(file) for file in (tmp_path / "iceberg").rglob("*.parquet")]
    values = [v for rows in remaining_tables for c in rows.columns if c.type == pa.int64() for v in c.to_pylist()]
    assert [v for v in values if v is not None] == ([] if kind == "dropped" else [2])
