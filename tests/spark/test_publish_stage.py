"""The stage `publish` with real Delta tables and a real PostgreSQL server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pandas as pd
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import RefusedError, UserError
from headrace.lake.spark.session import spark_settings
from headrace.publish import stage as publish_stage
from headrace.publish.opening import open_target
from headrace.publish.postgres import embedded, publication, tables
from headrace.publish.postgres import server as warehouse
from headrace.publish.stage import Publish
from headrace.stage import Outcome, run_stage
from headrace.stage.manifest import Manifest, Output
from tests.publish_support import redis_server, served
from tests.storage_support import Killed
from tests.warehouses import SCHEMA, Warehouses, in_warehouse, same, scores

DS = "2026-01-10"
NEXT = "2026-01-11"
SPEC = load_spec("clicks", ["score.top_k=4"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace whose server runs throughout this module."""
    ws = Workspace(tmp_path_factory.mktemp("publish") / "home")
    with embedded.lease(ws):
        yield ws


@pytest.fixture
def fresh(home: Workspace) -> Workspace:
    """The same with no table in the warehouse and nothing published in the lake."""
    with warehouse.connect(SPEC.publish.warehouse, home) as conn:  # type: ignore[union-attr]
        conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    for ds in (DS, NEXT):
        for name in ("score", "publish"):
            home.manifest("clicks", ds, name).local_path().unlink(missing_ok=True)
    return home


def land(spark: SparkSession, ws: Workspace, frame: pd.DataFrame, ds: str = DS, rows: int | None = None) -> None:
    """Leave what the stage `score` leaves: a Delta version and a manifest that pins it."""
    key = "string" if frame["user_id"].dtype == object else "bigint"
    path = str(ws.table("clicks", "scores"))
    (
        spark.createDataFrame(frame, SCHEMA.format(user=key, item=key))
        .write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", f"ds = '{ds}'")
        .partitionBy("ds")
        .save(path)
    )
    version = DeltaTable.forPath(spark, path).history(1).collect()[0]["version"]
    count = len(frame) if rows is None else rows
    Manifest(
        stage="score",
        pipeline="clicks",
        ds=ds,
        key=f"score-{version}",
        spec_hash="x",
        rows={"scores": count},
        outputs=(Output(kind="delta", name="lake/clicks/scores", version=str(version), rows=count),),
    ).save(ws.manifest("clicks", ds, "score"))


def publish(ws: Workspace, ds: str = DS, overrides: Sequence[str] = ()) -> Outcome:
    spec: Spec = load_spec("clicks", ["score.top_k=4", *overrides])
    return run_stage(Publish(), spec, ws, ds)


def in_lake(spark: SparkSession, ws: Workspace, ds: str = DS) -> pd.DataFrame:
    frame = spark.read.format("delta").load(str(ws.table("clicks", "published"))).where(f"ds = '{ds}'")
    return frame.orderBy("user_id", "rank").drop("published_key").toPandas()


def transactions(ws: Workspace) -> list[Any]:
    with warehouse.connect(SPEC.publish.warehouse, ws) as conn:  # type: ignore[union-attr]
        return conn.execute("SELECT xmin, ctid, * FROM clicks_scores").fetchall()


def test_publish_replace_and_heal(spark: SparkSession, fresh: Workspace) -> None:
    land(spark, fresh, scores(50))
    outcome = publish(fresh)
    assert not outcome.skipped
    same(in_warehouse(fresh), scores(50))
    same(in_lake(spark, fresh), scores(50))
    manifest = outcome.manifest
    assert manifest.output("postgres") == Output(
        kind="postgres", name="public.clicks_scores", version=manifest.key, rows=200
    )
    assert manifest.output("delta").name == "lake/clicks/published"
    assert manifest.rows == {"published": 200}
    assert len(manifest.facts["audit"]) == 11
    assert all(check["ok"] for check in manifest.facts["audit"])
    assert [r["rank"] for r in manifest.facts["sample"]] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert manifest.facts["sample"][0]["user_id"] == -2

    # The same again does nothing, and touches no row.
    transactions_before = transactions(fresh)
    assert publish(fresh).skipped
    assert transactions(fresh) == transactions_before

    # The next day is beside it; new scores for the first day replace it and leave the next.
    land(spark, fresh, scores(40, 1, NEXT), NEXT)
    assert not publish(fresh, NEXT).skipped
    land(spark, fresh, scores(45, 2))
    assert not publish(fresh).skipped
    same(in_warehouse(fresh), scores(45, 2))
    same(in_lake(spark, fresh), scores(45, 2))
    same(in_warehouse(fresh, ds=NEXT), scores(40, 1, NEXT))
    same(in_lake(spark, fresh, NEXT), scores(40, 1, NEXT))
    assert publish(fresh, NEXT).skipped, "the other day's publication made this one look undone"

    # Rows deleted by hand come back.
    with warehouse.connect(SPEC.publish.warehouse, fresh) as conn:  # type: ignore[union-attr]
        conn.execute("DELETE FROM clicks_scores WHERE ds = %s AND user_id = 3", [DS])
    healed = publish(fresh)
    assert healed.reason == "public.clicks_scores has 176 rows for 2026-01-10, and 180 were published"
    same(in_warehouse(fresh), scores(45, 2))


def test_scores_are_read_at_the_pinned_version(spark: SparkSession, fresh: Workspace) -> None:
    land(spark, fresh, scores(10))
    pinned = fresh.manifest("clicks", DS, "score").read_text()
    land(spark, fresh, scores(12, 5))
    fresh.manifest("clicks", DS, "score").local_path().write_text(pinned)
    publish(fresh)
    same(in_warehouse(fresh), scores(10))


def test_failed_audit_leaves_everything_as_it_was(spark: SparkSession, fresh: Workspace) -> None:
    land(spark, fresh, scores(50))
    publish(fresh)
    transactions_before, lake = transactions(fresh), in_lake(spark, fresh)
    bad = scores(50, 3)
    bad.loc[4, "score"] = np.inf
    bad.loc[9, "rank"] = 1
    land(spark, fresh, bad, rows=199)
    with pytest.raises(UserError) as refused:
        publish(fresh)
    message = str(refused.value)
    assert "failed 4 of 11 checks and were not published; public.clicks_scores is as it was" in message
    for line in (
        "  rows as the scores' manifest states: 200, must be 199",
        "  scores outside [0, 1]: 1, must be 0 (for example inf)",
        "  keys (user, rank) given twice: 1, must be 0 (for example user 0 rank 1)",
        "  users whose ranks are not 1, 2, ...: 1, must be 0 (for example user 0)",
    ):
        assert line in message.splitlines()
    assert transactions(fresh) == transactions_before
    same(in_lake(spark, fresh), lake)
    with warehouse.connect(SPEC.publish.warehouse, fresh) as conn:  # type: ignore[union-attr]
        staging_names = conn.execute(
            "SELECT relname FROM pg_class WHERE starts_with(relname, %s)", [tables.STAGING_PREFIX]
        )
        (staging_table,) = [name for (name,) in staging_names]
        assert f"The rows are in public.{staging_table}, to look at" in message
        assert conn.execute(f"SELECT count(*) FROM {staging_table}").fetchone() == (200,)
    # A day that is too small beside the last one is stopped too, and let through when the spec says so.
    land(spark, fresh, scores(20, 4, NEXT), NEXT)
    with pytest.raises(UserError, match=r"change of the number of rows: 0.6, must be at most 0.5 \(200 rows on 2026"):
        publish(fresh, NEXT)
    assert not publish(fresh, NEXT, ["publish.max_row_change=null"]).skipped


def test_a_day_is_held_against_the_last_one_other_tables_and_own_rules(
    spark: SparkSession, fresh: Workspace, tmp_path: Path
) -> None:
    """PostgreSQL's and Spark's figures against pandas'."""
    items = tmp_path / "items"
    items.mkdir()
    pq.write_table(pa.table({"id": pa.array(range(50), pa.int64())}), items / "all.parquet")
    overrides = [
        "publish.audit.max_score_psi=0.3",
        "publish.audit.max_item_psi=0.3",
        "publish.audit.max_new_items=0",
        f'publish.audit.references={{"item_id": {{"table": "{items}", "column": "id"}}}}',
        'publish.audit.rules={"first": {"expr": "avg(if(rank = 1, score, null))", "min": 0.5}, '
        '"users": {"sql": "SELECT count(DISTINCT user_id) FROM {staged}", "min": 50, "max": 50}, '
        '"growth": {"sql": "SELECT (SELECT count(*) FROM {staged}) - count(*) FROM {previous}", "min": 0}}',
    ]
    first, second = scores(50), scores(50, 1, NEXT)
    land(spark, fresh, first)
    facts = {c["name"]: c for c in publish(fresh, DS, overrides).manifest.facts["audit"]}
    assert facts["PSI of the scores"]["detail"] == facts["growth"]["detail"] == "no earlier day"
    assert facts["first"]["value"] == pytest.approx(first[first["rank"] == 1]["score"].mean(), abs=1e-4)
    assert facts["users"]["value"] == 50
    # Another model: its scores are a tenth of the last day's, and half of its rows have items that none had.
    second["score"] /= 10
    second.loc[second["rank"] > 2, "item_id"] += 50
    land(spark, fresh, second, NEXT)
    transactions_before = transactions(fresh)
    with pytest.raises(RefusedError) as refused:
        publish(fresh, NEXT, overrides)
    assert refused.value.exit_code == 3
    lines = {line.split(":")[0].strip(): line for line in str(refused.value).splitlines()[1:]}
    unknown = second[second["item_id"] >= 50]["item_id"]
    mean = second[second["rank"] == 1]["score"].mean()
    new = (~second["item_id"].isin(first["item_id"])).mean()
    expected_line = f"share of rows with a new item: {round(new, 4):g}, must be at most 0 (against 2026-01-10)"
    assert lines.pop("share of rows with a new item").strip() == expected_line
    expected_line = (
        f": {unknown.nunique()}, must be 0 (for example {', '.join(str(i) for i in sorted(unknown.unique())[:3])})"
    )
    assert lines.pop(f"values of item_id that {items} lacks").endswith(expected_line)
    assert lines.pop("first").strip().startswith(f"first: {round(float(mean), 4):g}, must be at least 0.5 (avg(if(")
    assert {name: "must be at most 0.3 (against 2026-01-10)" in line for name, line in lines.items()} == {
        "PSI of the scores": True,
        "PSI of the items": True,
    }
    assert transactions(fresh) == transactions_before
    for key, message in (
        ('references={"item": {"table": "x.y"}}', r"references.item: the scores have no such column; did you mean"),
        (f'references={{"item_id": {{"table": "{items}"}}}}', r"has no column 'item_id'; it has: id"),
        ('references={"item_id": {"table": "no.such.table"}}', r"no.such.table cannot be read"),
        ('rules={"mine": {"expr": "avg(scor)", "max": 1}}', r"publish.audit.rules.mine.expr: .*scor"),
        ('rules={"mine": {"expr": "score", "max": 1}}', r"publish.audit.rules.mine.expr: "),
    ):
        with pytest.raises(UserError, match=message):
            publish(fresh, NEXT, [f"publish.audit.{key}"])


@pytest.mark.parametrize("moment", ["audited", "swapped", "delta"])
def test_killed_anywhere_then_run_again(
    spark: SparkSession, fresh: Workspace, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    land(spark, fresh, scores(30))
    publish(fresh)
    old = in_warehouse(fresh)
    land(spark, fresh, scores(31, 6))

    module, name = {
        "audited": (publish_stage, "day_checks"),
        "swapped": (publication, "swap"),
        "delta": (publish_stage, "_write_delta"),
    }[moment]
    real = getattr(module, name)

    def dies(*args: Any) -> None:
        real(*args)
        conn = next((c for a in args if isinstance(c := getattr(a, "conn", a), psycopg.Connection)), None)
        if conn is not None:
            # The clean-up of a killed process does not happen: its connection is gone before anything else is said.
            conn.pgconn.finish()
        raise Killed

    monkeypatch.setattr(module, name, dies)
    with pytest.raises(Killed):
        publish(fresh)
    monkeypatch.undo()
    same(in_warehouse(fresh), old if moment == "audited" else scores(31, 6))
    versions = None
    if moment == "delta":
        versions = DeltaTable.forPath(spark, str(fresh.table("clicks", "published"))).history().count()
    outcome = publish(fresh)
    assert not outcome.skipped
    assert len(outcome.manifest.facts["audit"]) == 11
    same(in_warehouse(fresh), scores(31, 6))
    same(in_lake(spark, fresh), scores(31, 6))
    if versions is not None:
        assert DeltaTable.forPath(spark, str(fresh.table("clicks", "published"))).history().count() == versions
    assert publish(fresh).skipped


def test_text_keys_and_a_table_of_another_name(spark: SparkSession, ws: Workspace) -> None:
    frame = scores(8, text_keys=True)
    land(spark, ws, frame)
    outcome = publish(ws, overrides=["publish.table=top_items", "publish.warehouse.schema=served.v2"])
    assert outcome.manifest.output("postgres").name == "served.v2.top_items"
    same(in_warehouse(ws, '"served.v2".top_items'), frame)
    assert not embedded.status(ws).running


def test_a_version_that_is_gone_and_a_server_that_is_gone(spark: SparkSession, fresh: Workspace) -> None:
    land(spark, fresh, scores(5))
    path = fresh.manifest("clicks", DS, "score")
    manifest = Manifest.load(path)
    assert manifest is not None
    output = manifest.output("delta").model_copy(update={"version": "999"})
    manifest.model_copy(update={"outputs": (output,)}).save(path)
    with pytest.raises(UserError, match=r"version 999 of .*scores cannot be read .* --from score"):
        publish(fresh)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot reach 127.0.0.1:{port}/headrace as user 'headrace': Connection"):
            publish(fresh, overrides=["publish.warehouse.kind=postgres", f"publish.warehouse.port={port}"])


def test_executors_that_cannot_reach_the_server_say_so(spark: SparkSession, fresh: Workspace) -> None:
    land(spark, fresh, scores(5))
    df = spark.read.format("delta").load(str(fresh.table("clicks", "scores"))).where(f"ds = '{DS}'")
    place = SPEC.publish.warehouse  # type: ignore[union-attr]
    table = tables.scores_table("public", "clicks_scores", "user_id", "item_id", df.dtypes)
    with warehouse.serve(place, fresh) as server, warehouse.connect_to(server, place) as conn:
        tables.create_tables(conn, table)
        with publication.staging_table(conn, table, DS, "k") as staged, socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            closed = replace(server, port=s.getsockname()[1], password="secret word")
            with pytest.raises(UserError, match=r"could not write the scores .* Connection refused") as refused:
                publication.copy_scores(df, closed, staged, table)
            assert "secret word" not in str(refused.value)
            # An attempt that is repeated does not double its rows.
            assert publication.copy_scores(df, server, staged, table) == 20
            assert publication.copy_scores(df, server, staged, table) == 20
            count = conn.execute(f"SELECT count(*) FROM {staged.relation}").fetchone()
            assert count == (20,)


#: Keys that PostgreSQL does not hold as text, or in the index of the primary key.
UNFIT = ["nul\0", "\0", "".join(np.random.default_rng(1).choice(list("abcdefghijklmnop"), 4_000))]


def lmdb_items(folder: Path, user: str) -> list[str] | None:
    with lmdb.open(f"{folder}/top.lmdb", subdir=False, readonly=True, lock=False) as env, env.begin() as reading:
        value = None if len(user) > 511 else reading.get(user.encode())
    return None if value is None else [row["item"] for row in json.loads(value)]


def test_keys_that_the_warehouse_cannot_hold_are_left_out(
    spark: SparkSession, ws: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = scores(8, text_keys=True)
    users = frame["user_id"].unique()
    frame["user_id"] = frame["user_id"].replace({users[0]: UNFIT[0], users[1]: UNFIT[2], users[2]: "l" * 600})
    # Two of the four items of a list, and one of another's; the index has no items, so that a long one is fine.
    frame.loc[[13, 15, 17, 20], "item_id"] = [UNFIT[0], UNFIT[1], UNFIT[0], UNFIT[2]]
    land(spark, ws, frame)
    online = ["publish.online.kind=lmdb", f"publish.online.path={tmp_path}/top.lmdb"]
    expected = frame[~frame["user_id"].isin([UNFIT[0], UNFIT[2]]) & ~frame["item_id"].isin(UNFIT[:2])].copy()
    expected["rank"] = expected.groupby("user_id")["rank"].rank().astype(np.int32)
    assert len(expected) == len(frame) - 4 - 4 - 3
    with embedded.lease(ws):
        manifest = publish(ws, overrides=online).manifest
        same(in_warehouse(ws), expected)
        assert publish(ws, overrides=online).skipped
        # What the server refuses all the same is no fault of the network.
        df = spark.read.format("delta").load(str(ws.table("clicks", "scores")))
        place = SPEC.publish.warehouse  # type: ignore[union-attr]
        table = tables.scores_table("public", "clicks_scores", "user_id", "item_id", df.dtypes)
        with (
            warehouse.serve(place, ws) as server,
            warehouse.connect_to(server, place) as conn,
            publication.staging_table(conn, table, DS, "k") as staged,
            pytest.raises(UserError, match=r"invalid byte sequence .* public\.clicks_scores holds what it") as refused,
        ):
            publication.copy_scores(df, server, staged, table)
        assert "reachable" not in str(refused.value)
    same(in_lake(spark, ws), expected)
    # Of LMDB's keys the limit is another.
    assert lmdb_items(tmp_path, "l" * 600) is None
    for user in users[3:]:
        assert lmdb_items(tmp_path, user) == list(expected.query("user_id == @user").sort_values("rank")["item_id"])
    assert manifest.rows == {"published": len(expected), "left_out": 4 + 4 + 3 + 4}
    named = [next(iter(key.items())) for key in manifest.facts["left_out"]]
    assert sorted(named) == sorted(
        [*(("user_id", u) for u in (UNFIT[0], UNFIT[2], "l" * 600)), *(("item_id", i) for i in UNFIT[:2])]
    )
    assert "11 rows are left out: user_id " in caplog.text

    # Another warehouse holds other keys: 255 characters, NUL or not.
    place = Warehouses(tmp_path)
    publish(ws, overrides=place.overrides("sqlalchemy"))
    same(place.read("sqlalchemy", ws, DS), frame[frame["user_id"].str.len() <= 255])


def online(kind: str, folder: Path) -> list[str]:
    """Return the further keys of two warehouses' specs: they serve, too."""
    more = {
        "duckdb": ["kind=lmdb", f"path={folder / 'top.lmdb'}"],
        "parquet": ["kind=redis", f"url=unix://{folder}/redis.sock"],
    }
    return [f"publish.online.{text}" for text in more.get(kind, [])]


def test_every_kind_of_warehouse_has_the_same_scores(spark: SparkSession, fresh: Workspace, tmp_path: Path) -> None:
    places = Warehouses(tmp_path)
    with spark_settings(spark, places.properties), redis_server(tmp_path):
        land(spark, fresh, scores(50))
        land(spark, fresh, scores(40, 1, NEXT), NEXT)
        for kind in places.settings:
            overrides = places.overrides(kind) + online(kind, tmp_path)
            outcome = publish(fresh, overrides=overrides)
            if online(kind, tmp_path):
                expected = scores(50).query("user_id == 7").sort_values("rank")
                pairs = [
                    (int(i), pytest.approx(float(s)))
                    for i, s in zip(expected["item_id"], expected["score"], strict=True)
                ]
                assert served(kind, tmp_path, 7) == pairs
            assert outcome.manifest.rows == {"published": 200}, kind
            same(places.read(kind, fresh, DS), scores(50))
            same(places.read(kind, fresh, DS, current=True), scores(50))
            assert len(outcome.manifest.facts["sample"]) == 10
            assert publish(fresh, overrides=overrides).skipped, kind

            # Another day, with a column that the scores have gained; and the first day again, with other scores.
            with open_target(load_spec("clicks", ["score.top_k=4", *overrides]), fresh) as target:
                for frame, ds, key in ((scores(40, 1, NEXT), NEXT, "b"), (scores(45, 2), DS, "c")):
                    df = spark.createDataFrame(frame, SCHEMA.format(user="bigint", item="bigint"))
                    target.create(df.dtypes)
                    with target.stage(df, ds, key) as staged:
                        assert staged.previous is None or (staged.previous.ds, staged.previous.rows) == (DS, 200)
                        if staged.previous is not None:
                            counted = staged.query(f"SELECT count(*) FROM {staged.previous.relation}")
                            assert [tuple(row) for row in counted] == [(200,)]
                        target.swap(staged, "s", [])
                    assert target.missing(ds, key) is None
                assert target.days() == [DS, NEXT]
            same(places.read(kind, fresh, DS), scores(45, 2))
            same(places.read(kind, fresh, NEXT), scores(40, 1, NEXT))
            same(places.read(kind, fresh, NEXT, current=True), scores(40, 1, NEXT))
            assert places.read(kind, fresh, DS, current=True).empty

            with open_target(load_spec("clicks", overrides), fresh) as target:
                df = spark.createDataFrame(
                    scores(5).assign(source="x"), SCHEMA.format(user="bigint", item="bigint") + ", source string"
                )
                target.create(df.dtypes)
                with target.stage(df, "2026-01-13", "d") as staged:
                    target.keep(staged)
                assert target.drop_kept() == [staged.label]
                with target.stage(df.withColumn("ds", F.lit("2026-01-12")), "2026-01-12", "d") as staged:
                    target.swap(staged, "s", [])
                target.drop_days([DS])
                assert target.days() == [NEXT, "2026-01-12"]
                assert target.missing("2026-01-12", "d") is None
            if kind != "embedded":
                assert not list((fresh.home / "staging" / "clicks").iterdir())


def everywhere(folder: Path) -> set[int]:
    """The users of all Parquet files of a folder."""
    user_ids: set[int] = set()
    for file in folder.rglob("*.parquet"):
        rows = pq.ParquetFile(file).read()
        user_ids |= set(rows["user_id"].to_pylist()) if "user_id" in rows.column_names else set()
    return user_ids


@pytest.mark.parametrize("kind", ["embedded", "duckdb", "sqlalchemy", "parquet", "delta", "iceberg"])
def test_persons_are_erased_from_every_kind_of_warehouse(
    spark: SparkSession, fresh: Workspace, tmp_path: Path, kind: str
) -> None:
    """Rows of all days, of the newest day's table, and of what was published before in their place."""
    places = Warehouses(tmp_path)
    if kind not in places.settings:
        pytest.skip("Iceberg's jar is not here: make iceberg")
    forgotten = [-2, 7, 27]  # the smallest and the largest among them: bounds of files have those
    frames = {DS: scores(20), NEXT: scores(30, 1, NEXT)}
    with spark_settings(spark, places.properties):
        with open_target(load_spec("clicks", ["score.top_k=4", *places.overrides(kind)]), fresh) as target:
            days = {"old": (DS, scores(25, 5)), "b": (NEXT, frames[NEXT]), "a": (DS, frames[DS])}
            for key, (ds, frame) in days.items():
                df = spark.createDataFrame(frame, SCHEMA.format(user="bigint", item="bigint")).coalesce(1)
                target.create(df.dtypes)
                with target.stage(df, ds, key) as staged:
                    target.swap(staged, "s", [])
            assert target.rows_with("user_id", forgotten) == {DS: 8, NEXT: 12}
            assert target.rows_with("user_id", [4711]) == {}
            assert (target.leftovers("user_id", forgotten) > 0) == (kind in ("parquet", "delta", "iceberg"))
            assert target.erase("user_id", forgotten) == ""
            assert target.rows_with("user_id", forgotten) == {}
            assert target.leftovers("user_id", forgotten) == 0
            assert [target.missing(ds, key) for ds, key in ((DS, "a"), (NEXT, "b"))] == [None, None]
            assert target.days() == [DS, NEXT]
            assert target.erase("user_id", forgotten) == ""
        for ds, frame in frames.items():
            same(places.read(kind, fresh, ds), frame[~frame["user_id"].isin(forgotten)])
        same(places.read(kind, fresh, NEXT, current=True), frames[NEXT][~frames[NEXT]["user_id"].isin(forgotten)])
        if kind in ("parquet", "delta", "iceberg"):
            assert everywhere(tmp_path / kind) == {u for frame in frames.values() for u in frame["user_id"]} - {
                *forgotten
            }
        if kind == "iceberg":
            for manifest in (tmp_path / kind).rglob("*-m*.avro"):
                entries = spark.read.format("avro").load(str(manifest)).select("data_file.*").collect()
                bounds = [b for e in entries for b in (*e["lower_bounds"], *e["upper_bounds"]) if b["key"] == 2]
                assert bounds
                users = {int.from_bytes(b["value"], "little", signed=True) for b in bounds}
                assert not users & {*forgotten}, manifest
