"""Tables as sources: ingest and features of each kind against pandas and Spark's own reading."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config.features import Append
from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local
from tests.source_table_support import (
    COLUMNS,
    D1,
    D2,
    D3,
    D4,
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


@pytest.fixture(scope="module")
def plain(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Delta table by partition, of plain Spark's."""
    path = tmp_path_factory.mktemp("plain") / "events"
    frame(spark, make_rows()).repartition(2).write.format("delta").partitionBy("dt").save(str(path))
    return path


def test_partitions_of_a_delta_table_are_days(spark: SparkSession, ws: Workspace, plain: Path) -> None:
    spec = make_spec({"format": "delta", "path": str(plain), "day": {"partition": "dt"}})
    manifest = ingest(spec, ws, D3)
    assert [o.kind for o in manifest.outputs] == ["table", "quarantine"]
    assert (manifest.outputs[0].name, manifest.outputs[0].version) == (str(plain), "0")
    assert manifest.rows == {"read": 300, "kept": 300, "quarantined": 0, "duplicates": 0}
    assert manifest.facts["days"] == [D1, D2, D3]
    assert not ws.events("shop").exists()
    frames = dataset(spec, ws, D3)
    assert ids(frames) == expected(make_rows())
    # The Arrow engine read the data files themselves; Spark's engine makes the same of them.
    assert [p for p in ws.encoded("shop").entries() if p.is_dir()]
    spark_ws, appended = Workspace(ws.home / "spark"), Workspace(ws.home / "appended")
    slow = spec.model_copy(update={"features": spec.features.model_copy(update={"engine": "spark"})})
    ingest(slow, spark_ws, D3)
    for split, rows in dataset(slow, spark_ws, D3).items():
        pd.testing.assert_frame_equal(rows, frames[split], check_dtype=False)
    # Nothing to do again.
    assert ingest(spec, ws, D3).started == manifest.started
    # Days that are appended.
    more = make_spec({"format": "delta", "path": str(plain), "day": {"partition": "dt"}}, {}, {"append": True})
    for ds in (D2, D3):
        ingest(more, appended, ds)
        frames = dataset(more, appended, ds)
    assert ids(frames) == expected(make_rows())


def test_rows_that_break_the_declaration_are_left_out(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    rows = make_rows().astype({"user": object})
    rows.loc[5, "click"] = 7
    rows.loc[6, "ts"] = rows.loc[6, "ts"] - pd.Timedelta(days=3)
    rows.loc[7, "ts"] = rows.loc[7, "ts"] + pd.Timedelta(days=2)
    rows.loc[9, "id"] = 3  # of the same day
    rows.loc[10, "id"] = 6  # a day later than 6, which is bad
    rows.loc[14, "id"] = 13  # a day later than 13
    path = tmp_path / "events"
    frame(spark, rows).coalesce(1).write.format("delta").partitionBy("dt").save(str(path))
    spec = make_spec({"format": "delta", "path": str(path), "day": {"partition": "dt"}})
    manifest = ingest(spec, ws, D3)
    assert manifest.rows == {"read": 300, "kept": 295, "quarantined": 3, "duplicates": 2}
    assert manifest.facts["reasons"] == {
        "click: outside [0, 1]": 1,
        "ts: after the end of the day": 1,
        "ts: more than 1 day late": 1,
    }
    assert quarantined(spark, ws) == {
        5: "click: 7 is outside [0, 1]",
        6: f"ts: '{rows.loc[6, 'ts']:%Y-%m-%d %H:%M:%S}' is more than 1 day late",
        7: f"ts: '{rows.loc[7, 'ts']:%Y-%m-%d %H:%M:%S}' is after the end of the day",
        3: "repeats a row with the same id",
        13: "repeats a row with the same id",
    }
    assert ids(dataset(spec, ws, D3)) == expected(rows.drop([5, 6, 7, 9, 14]))


def test_a_mapped_table_with_deletion_vectors(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Days by a time column in a zone of its own; rows that are deleted are never seen, neither at first nor later."""
    path = tmp_path / "events"
    properties = "'delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'true'"
    spark.sql(f"CREATE TABLE delta.`{path}` ({DDL}, old double) USING delta TBLPROPERTIES ({properties})")
    rows = make_rows()
    table_frame = frame(spark, rows).selectExpr("*", "0d AS old").repartition(2)
    table_frame.write.format("delta").mode("append").save(str(path))
    spark.sql(f"ALTER TABLE delta.`{path}` RENAME COLUMN price TO cost")
    spark.sql(f"ALTER TABLE delta.`{path}` DROP COLUMN old")
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id % 11 = 0")
    with pytest.raises(UserError, match="maps its columns' names"):
        DeltaLog(local(path)).plain_files(4)
    remaining = rows[rows["id"] % 11 != 0]
    columns = [c | {"name": "cost"} if c["name"] == "price" else c for c in COLUMNS]
    source = {"format": "delta", "path": str(path), "day": {"time": "ts"}, "timezone": "America/New_York"}
    workflow = [{"columns": ["cost"], "ops": ["fill_missing", "normalize"]}]
    spec = make_spec(source, {"columns": columns, "late_days": 3}, {"workflow": workflow})
    manifest = ingest(spec, ws, D3)
    local_day = remaining["ts"].dt.tz_convert("America/New_York").dt.strftime("%Y-%m-%d")
    assert manifest.rows["read"] == (local_day <= D3).sum()
    event_ids = ids(dataset(spec, ws, D3))
    assert event_ids == expected(remaining[local_day <= D3])
    # Spark's own reading of the same version.
    seen = spark.read.format("delta").option("versionAsOf", int(manifest.outputs[0].version)).load(str(path))
    day_rows = seen.where(f"ts >= '{D3} 00:00:00' AND ts < '{D4} 00:00:00'").collect()
    assert event_ids["valid"] == sorted(r["id"] for r in day_rows)
    by_append = spec.model_copy(update={"features": spec.features.model_copy(update={"append": Append()})})
    with pytest.raises(
        UserError, match=r"features\.append reads data files themselves, and those of .*events at version 4"
    ):
        dataset(by_append, ws, D3)

    # Late rows, updates and deletes of days that were taken are counted, and the day is taken as it is now.
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id IN (1, 4)")
    spark.sql(f"UPDATE delta.`{path}` SET click = 1 - click WHERE id IN (7, 10, 13)")
    late = make_rows(5, 1000, D2).rename(columns={"price": "cost"})
    frame(spark, late).write.format("delta").mode("append").save(str(path))
    rerun = ingest(spec, ws, D3)
    changed = pd.DataFrame(rerun.facts["changed_days"]).set_index("ds").sum()
    assert changed.to_dict() == {"late": 5, "updated": 3, "deleted": 2}
    current = pd.concat([remaining[~remaining["id"].isin([1, 4])], late])
    local_day = current["ts"].dt.tz_convert("America/New_York").dt.strftime("%Y-%m-%d")
    assert ids(dataset(spec, ws, D3)) == expected(current[local_day <= D3])
    # A day that may not change stops the run.
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 2")
    strict = make_spec(
        source | {"changed_days": {"deletes": "refuse"}}, {"columns": columns, "late_days": 3}, {"workflow": workflow}
    )
    with pytest.raises(UserError, match=f"{D2}: 1 deleted.*source.changed_days"):
        ingest(strict, ws, D3)


def test_a_folder_of_parquet(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rows = make_rows()
    frame(spark, rows).selectExpr("* EXCEPT (dt)", "date_format(dt, 'yyyyMMdd') AS dt").write.partitionBy("dt").parquet(
        str(path)
    )
    spec = make_spec({"format": "parquet", "path": str(path), "day": {"partition": "dt"}}, {"keys": []})
    manifest = ingest(spec, ws, D3)
    assert manifest.rows["kept"] == 300
    assert ids(dataset(spec, ws, D3)) == expected(rows)
    # A day that comes later changes nothing for this one; one that is rewritten does.
    extra = make_rows(9, 1000, D4)
    frame(spark, extra).drop("dt").write.parquet(str(path / "dt=20260304"))
    assert ingest(spec, ws, D3).started == manifest.started
    assert ingest(spec, ws, D4).rows["kept"] == 9
    assert ids(dataset(spec, ws, D4)) == expected(pd.concat([rows, extra]), D4)
    for file in (path / "dt=20260302").glob("*.parquet"):
        file.unlink()
    with pytest.raises(UserError, match=f"of {D2} are others than when ingest ran"):
        dataset(spec.model_copy(update={"features": spec.features.model_copy(update={"window_days": 1})}), ws, D3)
    rerun = ingest(spec, ws, D3)
    assert rerun.facts["changed_days"] == [{"ds": D2, "late": 0, "updated": 0, "deleted": 100}]


def test_a_table_of_sparks_catalog(spark: SparkSession, ws: Workspace) -> None:
    rows = make_rows()
    spark.sql("CREATE DATABASE IF NOT EXISTS taken")
    try:
        frame(spark, rows).write.format("delta").partitionBy("dt").saveAsTable("taken.events")
        frame(spark, rows).write.format("parquet").partitionBy("dt").saveAsTable("taken.files")
        spark.sql("CREATE VIEW taken.seen AS SELECT * FROM taken.events")
        for name in ("spark_catalog.taken.events", "taken.files"):
            home = Workspace(ws.home / name)
            spec = make_spec({"table": name, "day": {"partition": "dt"}})
            assert ingest(spec, home, D3).outputs[0].name == name
            assert ids(dataset(spec, home, D3)) == expected(rows)
        for name, message in (("taken.event", "Spark finds no table"), ("taken.seen", "is a view")):
            with pytest.raises(UserError, match=message):
                ingest(make_spec({"table": name}), ws, D3)
    finally:
        spark.sql("DROP DATABASE taken CASCADE")


def test_a_day_is_taken_when_it_is_complete(ws: Workspace, plain: Path) -> None:
    source = {"format": "delta", "path": str(plain), "day": {"partition": "dt"}}
    watermark = {"watermark": {"column": "ts", "at_least": "23h30m"}}
    # The days before it are taken when the run's own is behind.
    for complete, message, home in (
        ({"marker": "ready/{ds}"}, "the marker .* is not there", ws),
        (watermark, "'ts' has reached", Workspace(ws.home / "watermark")),
    ):
        with pytest.raises(IncompleteError, match=f"{D3} is not complete yet: {message}"):
            ingest(make_spec(source | {"complete": complete}), home, D3)
    for ds in (D1, D3):
        (ws.lake / "ready" / ds).put_text("")
    manifest = ingest(make_spec(source | {"complete": {"marker": "ready/{ds}"}}), ws, D3)
    assert manifest.facts["days"] == [D1, D3]


def test_faults_of_a_declaration(ws: Workspace, plain: Path) -> None:
    source = {"format": "delta", "path": str(plain), "day": {"partition": "dt"}}
    flag = {"name": "id", "type": "boolean"}
    for spec, message in (
        (make_spec(source | {"day": {"partition": "day"}}), "is not partitioned by 'day'"),
        (make_spec(source | {"day": {"time": "id"}}), "column 'id' of delta .* is bigint, not a timestamp or date"),
        (make_spec(source | {"path": "nowhere"}), "there is no Delta table at"),
        (make_spec(source | {"version": 3}), "the newest version of .* is 0, not 3"),
        (make_spec(source, {"columns": [flag, *COLUMNS[1:]]}), "'id' is bigint in .* cannot be read as boolean"),
        (make_spec(source, {"columns": [*COLUMNS, {"name": "no", "required": True}]}), "has no column 'no'"),
        (make_spec(source, {"expectations": {"min_rows": 101}}), f"{D1} breaks 1 of its expectations"),
    ):
        with pytest.raises(UserError, match=message):
            ingest(spec, ws, D3)
    with pytest.raises(UserError, match=f"has no rows of {D4}: its days are {D1} to {D3}"):
        ingest(make_spec(source), ws, D4)


def test_a_snapshot_at_an_older_version(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rows = make_rows()
    frame(spark, rows).write.format("delta").save(str(path))
    frame(spark, make_rows(30, 1000)).write.format("delta").mode("append").save(str(path))
    spec = make_spec(
        {"format": "delta", "path": str(path), "version": 0}, {"event_time": None}, {"split": {"by": "position"}}
    )
    manifest = ingest(spec, ws, D3)
    assert (manifest.outputs[0].version, manifest.rows["kept"]) == ("0", 300)
    event_ids = ids(dataset(spec, ws, D3))
    assert sorted(event_ids["train"] + event_ids["valid"]) == list(range(300))


def test_types_and_places_of_columns(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Small integers, a decimal, a struct's field, a map's key, binary; a value that its type cannot hold."""
    path = tmp_path / "events"
    rows = make_rows()
    table_frame = frame(spark, rows).selectExpr(
        "id",
        "ts",
        "struct(struct(user AS name) AS who) AS of",
        "map('item', item, 'other', 0L) AS attributes",
        "CAST(price AS decimal(12,3)) AS price",
        "CAST(click AS tinyint) AS click",
        "CAST(IF(id = 30, 1000, id % 100) AS int) AS small",
        "to_binary(hex(user), 'hex') AS user_bytes",
        "dt",
    )
    table_frame.coalesce(1).write.format("delta").partitionBy("dt").save(str(path))
    columns = [
        *COLUMNS[:2],
        {"name": "user", "path": "of.who.name"},
        {"name": "item", "type": "bigint", "path": "attributes['item']"},
        {"name": "price", "type": "decimal(12,3)"},
        {"name": "click", "type": "int", "required": True},
        {"name": "small", "type": "tinyint"},
        {"name": "hash", "type": "binary", "path": "user_bytes"},
    ]
    workflow = [
        {"columns": ["price"], "ops": [{"fill_missing": {"value": -1}}]},
        {"columns": ["user", "item"], "ops": ["categorify"]},
        {"columns": ["hash"], "ops": ["categorify"]},
        {"columns": ["small"], "ops": []},
    ]
    source = {"format": "delta", "path": str(path), "day": {"partition": "dt"}}
    spec = make_spec(source, {"columns": columns}, {"workflow": workflow})
    manifest = ingest(spec, ws, D3)
    assert manifest.rows == {"read": 300, "kept": 299, "quarantined": 1, "duplicates": 0}
    assert manifest.facts["reasons"] == {"small: not a tinyint": 1}
    assert quarantined(spark, ws) == {30: "small: '1000' is not a tinyint"}
    frames = dataset(spec, ws, D3)
    assert ids(frames) == expected(rows.drop([30]))
    for split in frames.values():
        assert (split["small"] == split["id"] % 100).all()
        assert (split["price"] == split["id"] / 8).all()
        # One code a user, whichever way it is spelled.
        assert len(split[["user", "hash"]].drop_duplicates()) == split["user"].nunique() == split["hash"].nunique()


def test_days_of_a_table_are_taken_when_they_are_complete(
    spark: SparkSession, ws: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A marker before the version is pinned; a watermark over all of the table; a control file's count."""
    path = tmp_path / "events"
    frame(spark, make_rows()).write.format("delta").partitionBy("dt").save(str(path))
    complete = {
        "marker": "done/{ds}",
        "watermark": {"column": "ts", "at_least": "23h"},
        "control": {"path": "count/{ds}"},
    }
    source = {"format": "delta", "path": str(path), "day": {"partition": "dt"}, "complete": complete}
    spec = make_spec(source)

    def put(name: str, text: str = "") -> None:
        (ws.home / name).parent.mkdir(parents=True, exist_ok=True)
        (ws.home / name).write_text(text)

    for ds in (D1, D2, D3):
        put(f"count/{ds}", "100")
    with pytest.raises(IncompleteError, match=f"{D3} is not complete yet: the marker"):
        ingest(spec, ws, D3)
    put(f"done/{D3}")
    put(f"done/{D1}")
    manifest = ingest(spec, ws, D3)
    assert manifest.facts["days"] == [D1, D3]
    assert f"{D2} is left out as it is not complete" in caplog.text
    # The table has nothing of that hour yet; then a count that is not what is there.
    late = make_spec(source | {"complete": complete | {"watermark": {"column": "ts", "at_least": "2d"}}})
    put(f"done/{D2}")
    other_ws = Workspace(ws.home / "other")
    for name in (f"done/{D3}", f"count/{D3}"):
        (other_ws.home / name).parent.mkdir(parents=True, exist_ok=True)
        (other_ws.home / name).write_text("100" if "count" in name else "")
    with pytest.raises(IncompleteError, match=f"{D3} is not complete yet: 'ts' has reached"):
        ingest(late, other_ws, D3)
    (other_ws.home / f"count/{D3}").write_text("99")
    with pytest.raises(UserError, match="100 rows were read, and the control file says 99"):
        ingest(spec, other_ws, D3)
    # Days that were taken are not asked again.
    (ws.home / f"done/{D1}").unlink()
    assert ingest(spec, ws, D3).facts["days"] == [D2]
