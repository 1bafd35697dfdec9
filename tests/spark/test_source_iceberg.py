"""Iceberg tables as sources, by path and from catalogs: against pandas and Spark's own reading of the snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.spark.session import iceberg_jars, spark_settings
from headrace.lake.tables.iceberg import IcebergSnapshot
from headrace.lake.tables.iceberg_metadata import newest_metadata
from headrace.storage import local
from tests.source_table_support import (
    COLUMNS,
    D1,
    D2,
    D3,
    DDL,
    dataset,
    expected,
    frame,
    ids,
    ingest,
    make_rows,
    make_spec,
    quarantined,
)

pytestmark = pytest.mark.skipif(not iceberg_jars(), reason="Iceberg's jar is not here: run `make iceberg`")

MERGE_ON_READ = "'write.delete.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read'"


@pytest.fixture(scope="module")
def warehouse(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the catalog `lake`, on disk; `service` keeps in a database which metadata file is the newest."""
    folder = tmp_path_factory.mktemp("warehouse")
    catalog = "org.apache.iceberg.spark.SparkCatalog"
    properties = {
        "spark.sql.catalog.lake": catalog,
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": str(folder),
        "spark.sql.catalog.service": catalog,
        "spark.sql.catalog.service.type": "jdbc",
        "spark.sql.catalog.service.uri": "jdbc:derby:memory:iceberg;create=true",
        "spark.sql.catalog.service.warehouse": str(folder / "service"),
    }
    with spark_settings(spark, properties):
        yield folder


def create(spark: SparkSession, name: str, rows: pd.DataFrame, more: str = "", properties: str = "") -> None:
    """A table of two files a partition, or two in all."""
    properties_clause = f"TBLPROPERTIES ({properties})" if properties else ""
    spark.sql(f"CREATE TABLE {name} ({DDL}) USING iceberg {more} {properties_clause}")
    frame(spark, rows).repartition(2).writeTo(name).append()


def newest(spark: SparkSession, name: str) -> int:
    snapshots = spark.sql(f"SELECT snapshot_id FROM {name}.snapshots ORDER BY committed_at").collect()
    return int(snapshots[-1][0])


def table_of(spark: SparkSession, name: str) -> Any:
    """Iceberg's own object."""
    jvm = spark._jvm
    assert jvm is not None
    return jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, name)


def test_a_table_by_its_path_and_by_its_name(spark: SparkSession, ws: Workspace, warehouse: Path) -> None:
    """Days are partitions; both engines read what was pinned, whatever other writers do then."""
    rows = make_rows()
    create(spark, "lake.db.events", rows, "PARTITIONED BY (dt)")
    path = warehouse / "db" / "events"
    spec = make_spec({"format": "iceberg", "path": str(path), "day": {"partition": "dt"}})
    named = make_spec({"table": "lake.db.events", "day": {"partition": "dt"}})
    homes = {"path": ws, "name": Workspace(ws.home / "name"), "spark": Workspace(ws.home / "spark")}
    slow = spec.model_copy(update={"features": spec.features.model_copy(update={"engine": "spark"})})
    specs = {"path": spec, "name": named, "spark": slow}
    pin = newest(spark, "lake.db.events")
    for way, home in homes.items():
        manifest = ingest(specs[way], home, D3)
        assert [o.kind for o in manifest.outputs] == ["table", "quarantine"]
        name = "lake.db.events" if way == "name" else str(path)
        assert (manifest.outputs[0].name, manifest.outputs[0].version) == (name, str(pin))
        assert manifest.rows == {"read": 300, "kept": 300, "quarantined": 0, "duplicates": 0}
        assert manifest.facts["days"] == [D1, D2, D3]
        assert ingest(specs[way], home, D3).started == manifest.started

    spark.sql("DELETE FROM lake.db.events WHERE id < 30")
    frame(spark, make_rows(7, 1000, D3)).writeTo("lake.db.events").append()
    frames = {way: dataset(specs[way], home, D3) for way, home in homes.items()}
    assert ids(frames["path"]) == expected(rows)
    # The Arrow engine read the data files themselves.
    assert [p for p in ws.encoded("shop").entries() if p.is_dir()]
    for way in ("name", "spark"):
        for split, of_split in frames[way].items():
            pd.testing.assert_frame_equal(of_split, frames["path"][split], check_dtype=False)

    current = pd.concat([rows[rows["id"] >= 30], make_rows(7, 1000, D3)])
    for way in ("path", "name"):
        manifest = ingest(specs[way], homes[way], D3)
        assert manifest.outputs[0].version == str(newest(spark, "lake.db.events"))
        changed = pd.DataFrame(manifest.facts["changed_days"]).set_index("ds").sum()
        assert changed.to_dict() == {"late": 7, "updated": 0, "deleted": 30}
        assert ids(dataset(specs[way], homes[way], D3)) == expected(current)


@pytest.mark.parametrize("version", [2, 3])
def test_rows_deleted_by_merge_on_read(spark: SparkSession, ws: Workspace, warehouse: Path, version: int) -> None:
    """Position deletes and deletion vectors; hidden partitions, a zone of its own; columns renamed, dropped and new."""
    name = f"lake.db.deleted{version}"
    rows = make_rows()
    create(spark, name, rows, "PARTITIONED BY (days(ts))", f"'format-version' = '{version}', {MERGE_ON_READ}")
    spark.sql(f"ALTER TABLE {name} RENAME COLUMN price TO cost")
    spark.sql(f"ALTER TABLE {name} DROP COLUMN item")
    spark.sql(f"ALTER TABLE {name} ADD COLUMN item bigint")
    spark.sql(f"DELETE FROM {name} WHERE id % 11 = 0")
    assert spark.table(f"{name}.delete_files").count() > 0
    remaining = rows[rows["id"] % 11 != 0]
    columns = [c | {"name": "cost"} if c["name"] == "price" else c for c in COLUMNS]
    source = {
        "format": "iceberg",
        "path": str(warehouse / "db" / f"deleted{version}"),
        "day": {"time": "ts"},
        "timezone": "America/New_York",
    }
    workflow = [{"columns": ["cost"], "ops": ["fill_missing", "normalize"]}]
    spec = make_spec(source, {"columns": columns, "late_days": 3}, {"workflow": workflow, "carried": ["id", "item"]})
    manifest = ingest(spec, ws, D3)
    local_day = remaining["ts"].dt.tz_convert("America/New_York").dt.strftime("%Y-%m-%d")
    assert manifest.rows["read"] == (local_day <= D3).sum()
    # Another writer deletes more between the stages.
    spark.sql(f"DELETE FROM {name} WHERE id IN (1, 4)")
    frames = dataset(spec, ws, D3)
    assert ids(frames) == expected(remaining[local_day <= D3])
    assert all(split["item"].isna().all() for split in frames.values())  # another column than was dropped
    pinned = spark.sql(f"SELECT id, ts FROM {name} VERSION AS OF {manifest.outputs[0].version}").toPandas()
    assert sorted(pinned["id"]) == sorted(remaining["id"])
    day = pinned["ts"].dt.strftime("%Y-%m-%d")
    assert ids(frames)["valid"] == sorted(pinned["id"][day == D3])

    # Late rows, updates and deletes of days that were taken are counted.
    spark.sql(f"UPDATE {name} SET click = 1 - click WHERE id IN (7, 10, 13)")
    late = make_rows(5, 1000, D2).rename(columns={"price": "cost"})
    frame(spark, late).select(*spark.table(name).columns).writeTo(name).append()
    rerun = ingest(spec, ws, D3)
    changed = pd.DataFrame(rerun.facts["changed_days"]).set_index("ds").sum()
    assert changed.to_dict() == {"late": 5, "updated": 3, "deleted": 2}
    current = pd.concat([remaining[~remaining["id"].isin([1, 4])], late])
    local_day = current["ts"].dt.tz_convert("America/New_York").dt.strftime("%Y-%m-%d")
    assert ids(dataset(spec, ws, D3)) == expected(current[local_day <= D3])


def test_rows_deleted_by_equality(spark: SparkSession, ws: Workspace, warehouse: Path) -> None:
    """Deletes are as Flink writes them; rows that come after the delete stay."""
    name = "lake.db.equality"
    rows = make_rows()
    create(spark, name, rows, "PARTITIONED BY (dt)", "'format-version' = '2'")
    jvm, gateway, table = spark._jvm, spark.sparkContext._gateway, table_of(spark, name)
    assert jvm is not None
    assert gateway is not None
    iceberg = jvm.org.apache.iceberg
    by = table.schema().select(["user"])
    field = gateway.new_array(gateway.jvm.int, 1)
    field[0] = by.findField("user").fieldId()
    table.updateSpec().removeField("dt").commit()  # a delete file without a partition is of all of them
    factory = iceberg.data.GenericAppenderFactory(table.schema(), table.spec(), field, by, None)
    out = table.io().newOutputFile(str(warehouse / "db" / "equality" / "data" / "deletes.parquet"))
    encrypted = iceberg.encryption.EncryptedFiles.encryptedOutput(out, iceberg.encryption.EncryptionKeyMetadata.EMPTY)
    writer = factory.newEqDeleteWriter(encrypted, iceberg.FileFormat.PARQUET, None)
    record = iceberg.data.GenericRecord.create(by)
    record.setField("user", "u3")
    writer.write(record)
    writer.close()
    table.newRowDelta().addDeletes(writer.toDeleteFile()).commit()
    spark.sql(f"REFRESH TABLE {name}")
    after = make_rows(40, 1000)
    frame(spark, after).writeTo(name).append()

    spec = make_spec({"format": "iceberg", "path": str(warehouse / "db" / "equality"), "day": {"time": "ts"}})
    ingest(spec, ws, D3)
    remaining = pd.concat([rows[rows["user"] != "u3"], after])
    assert 0 < len(remaining) - 40 < 300
    assert sorted(r["id"] for r in spark.table(name).collect()) == sorted(remaining["id"])
    assert ids(dataset(spec, ws, D3)) == expected(remaining)


def test_rows_that_break_the_declaration_are_left_out(spark: SparkSession, ws: Workspace, warehouse: Path) -> None:
    """Rows are left out by file and position, also where the keys do not tell rows apart."""
    rows = make_rows().astype({"user": object})
    rows.loc[5, "click"] = 7
    rows.loc[6, "ts"] = rows.loc[6, "ts"] - pd.Timedelta(days=3)
    rows.loc[12, "id"] = 3  # of the same day
    rows.loc[14, "id"] = 13  # a day later than 13
    create(spark, "lake.db.broken", rows, "PARTITIONED BY (dt)", MERGE_ON_READ)
    spark.sql("DELETE FROM lake.db.broken WHERE id = 20")
    path = warehouse / "db" / "broken"
    spec = make_spec({"format": "iceberg", "path": str(path), "day": {"partition": "dt"}})
    manifest = ingest(spec, ws, D3)
    assert manifest.rows == {"read": 299, "kept": 295, "quarantined": 2, "duplicates": 2}
    quarantine = quarantined(spark, ws)
    assert {k: quarantine[k] for k in (5, 3, 13)} == {
        5: "click: 7 is outside [0, 1]",
        3: "repeats a row with the same id",
        13: "repeats a row with the same id",
    }
    assert ids(dataset(spec, ws, D3)) == expected(rows.drop([5, 6, 12, 14, 20]))
    # Each place is the row's own.
    snapshot = IcebergSnapshot(spec.source, newest_metadata(local(path / "metadata")), int(manifest.outputs[0].version))  # type: ignore[arg-type]
    files = {f.name: f.path for f in snapshot.files}
    seen = snapshot.rows(spark, None).select("id", "_source_file", "_source_line").toPandas()
    assert set(seen["_source_file"]) == set(files)
    for name, of_file in seen.groupby("_source_file"):
        file_ids = pd.read_parquet(files[name])["id"]
        assert list(file_ids.iloc[of_file["_source_line"]]) == list(of_file["id"])


def test_older_snapshots_and_expired_ones(spark: SparkSession, ws: Workspace, warehouse: Path) -> None:
    name = "lake.db.older"
    rows = make_rows()
    create(spark, name, rows)
    first = newest(spark, name)
    time.sleep(0.01)
    between = datetime.now(UTC)
    time.sleep(0.01)
    frame(spark, make_rows(30, 1000)).writeTo(name).append()
    path = str(warehouse / "db" / "older")
    more: tuple[Any, ...] = ({"event_time": None}, {"split": {"by": "position"}})
    source = {"format": "iceberg", "path": path}
    for pin in ({"version": first}, {"as_of": between.isoformat()}):
        spec = make_spec(source | pin, *more)
        home = Workspace(ws.home / next(iter(pin)))
        manifest = ingest(spec, home, D3)
        assert (manifest.outputs[0].version, manifest.rows["kept"]) == (str(first), 300)
        event_ids = ids(dataset(spec, home, D3))
        assert sorted(event_ids["train"] + event_ids["valid"]) == list(range(300))
    for pin, message in (
        ({"version": 7}, f"source.version: .*{path} has no snapshot 7; its newest are {first}, "),
        ({"as_of": "2020-01-01T00:00:00Z"}, "source.as_of: .* has no snapshot of 2020"),
        ({"path": path + "x"}, "there is no Iceberg table at .*olderx"),
        ({"path": str(warehouse / "db")}, "there is no Iceberg table at"),
    ):
        with pytest.raises(UserError, match=message):
            ingest(make_spec(source | pin, *more), Workspace(ws.home / "none"), D3)

    table_of(spark, name).expireSnapshots().expireSnapshotId(first).commit()
    spark.sql(f"REFRESH TABLE {name}")
    home = Workspace(ws.home / "version")
    short_window = spec.model_copy(update={"features": spec.features.model_copy(update={"window_days": 1})})
    with pytest.raises(UserError, match=f"snapshot {first} of .* has expired.*Run ingest again"):
        dataset(short_window, home, D3)
    manifest = ingest(make_spec(source, *more), home, D3)
    assert (manifest.outputs[0].version, manifest.rows["kept"]) == (str(newest(spark, name)), 330)


def test_a_catalog_that_alone_knows_the_newest_version(spark: SparkSession, ws: Workspace, warehouse: Path) -> None:
    rows = make_rows()
    create(spark, "service.db.events", rows, "PARTITIONED BY (days(ts))", MERGE_ON_READ)
    spark.sql("DELETE FROM service.db.events WHERE id % 7 = 0")
    spec = make_spec({"table": "service.db.events", "day": {"time": "ts"}})
    manifest = ingest(spec, ws, D3)
    assert manifest.outputs[0].version == str(newest(spark, "service.db.events"))
    place = manifest.facts["table"]["place"]
    assert place["metadata"].startswith(str(warehouse / "service"))
    # Nothing to do again; the newest version is the catalog's, not a file that lies there.
    Path(place["metadata"]).with_name("99999-x.metadata.json").write_text(Path(place["metadata"]).read_text())
    assert ingest(spec, ws, D3).started == manifest.started
    with pytest.raises(UserError, match="is known to its catalog alone: give its name"):
        ingest(make_spec({"format": "iceberg", "path": place["path"]}), ws, D3)
    frame(spark, make_rows(9, 1000, D3)).writeTo("service.db.events").append()
    remaining = rows[rows["id"] % 7 != 0]
    assert ids(dataset(spec, ws, D3)) == expected(remaining)
    rerun = ingest(spec, ws, D3)
    assert rerun.facts["changed_days"] == [{"ds": D3, "late": 9, "updated": 0, "deleted": 0}]
    assert ids(dataset(spec, ws, D3)) == expected(pd.concat([remaining, make_rows(9, 1000, D3)]))
    with pytest.raises(UserError, match=r"Spark finds no table service\.db\.nothing"):
        ingest(make_spec({"table": "service.db.nothing"}), ws, D3)


def test_days_of_files_by_their_metrics(spark: SparkSession, warehouse: Path) -> None:
    """Against the metrics as Iceberg reads them."""
    rows = make_rows()
    create(spark, "lake.db.metrics", rows, "PARTITIONED BY (dt)")
    spec = make_spec({"format": "iceberg", "path": str(warehouse / "db" / "metrics"), "day": {"time": "ts"}})
    metadata = newest_metadata(local(warehouse / "db" / "metrics" / "metadata"))
    assert metadata.current is not None
    snapshot = IcebergSnapshot(spec.source, metadata, metadata.current)  # type: ignore[arg-type]
    metrics = spark.table("lake.db.metrics.files").select(
        "file_path", F.date_format("partition.dt", "yyyy-MM-dd").alias("dt"), "readable_metrics.ts.*"
    )
    expected = {
        r["file_path"]: (f"{r['lower_bound']:%Y-%m-%d}", f"{r['upper_bound']:%Y-%m-%d}", r["dt"])
        for r in metrics.collect()
    }
    assert {str(f.path): (f.first, f.last, (f.partition or {})["dt"]) for f in snapshot.files} == expected
    assert len(expected) >= 3
    assert snapshot.plain
    # A row without a time is of no day: its file may not be read as it is.
    frame(spark, make_rows(3, 1000)).withColumn("ts", F.expr("IF(id = 1001, NULL, ts)")).writeTo(
        "lake.db.metrics"
    ).append()
    metadata = newest_metadata(local(warehouse / "db" / "metrics" / "metadata"))
    assert metadata.current is not None
    files = IcebergSnapshot(spec.source, metadata, metadata.current).files  # type: ignore[arg-type]
    assert [f.may_lack_days for f in files].count(True) == 1
