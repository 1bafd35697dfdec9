"""Warehouses of files, with real tables of Parquet, Delta and Iceberg: publishers that are killed, or were paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.spark.session import spark_settings
from headrace.publish.files import StagedFiles
from headrace.publish.opening import open_target
from headrace.publish.tables.delta import DeltaTarget
from headrace.publish.tables.iceberg import IcebergTarget
from headrace.publish.tables.parquet import ParquetTarget
from headrace.publish.tables.spark_table import Records
from headrace.stage import RunLock
from headrace.storage import Lease, LeaseLost
from headrace.storage.lease import Holder
from tests.publish_support import holding
from tests.storage_support import Killed
from tests.warehouses import SCHEMA, Warehouses, same, scores

DS = "2026-01-10"


@pytest.mark.parametrize("lost", [True, False])
def test_a_run_whose_staged_files_another_one_has_removed(spark: SparkSession, tmp_path: Path, lost: bool) -> None:
    """The run was paused, and says so; if the lease is still its own, the error is the plain one."""
    holds_lease = [True]
    lock = RunLock((Lease(Holder(token=1, lease="l"), lambda: holds_lease[0]),))
    overrides = ["score.top_k=4", "publish.warehouse.kind=parquet", f"publish.warehouse.path={tmp_path / 'w'}"]
    df = spark.createDataFrame(scores(3), SCHEMA.format(user="bigint", item="bigint"))
    with open_target(load_spec("clicks", overrides), Workspace(tmp_path / "home"), lock) as target:
        target.create(df.dtypes)

        def swapped() -> None:
            with target.stage(df, DS, "k") as staged:
                assert isinstance(staged, StagedFiles)
                for file in staged.files:
                    file.unlink()
                holds_lease[0] = not lost
                target.swap(staged, "s", [])

        with pytest.raises(LeaseLost if lost else Py4JJavaError, match="any more" if lost else "NOT_EXIST"):
            swapped()
        assert target.days() == []


#: After which calls a publisher of files is killed, one after another; which rows the table, the copy of the newest day
#: and the record then are of.
_KILLS: dict[str, list[tuple[type, str, str]]] = {
    "parquet": [(ParquetTarget, "_discard", "old old old"), (ParquetTarget, "_save", "new new new")],
    "delta": [
        (DeltaTarget, "write_day", "new old old"),
        (DeltaTarget, "write_current", "new new old"),
        (Records, "save", "new new new"),
    ],
    "iceberg": [
        (IcebergTarget, "write_day", "new old old"),
        (IcebergTarget, "write_current", "new new old"),
        (Records, "save", "new new new"),
    ],
}


@pytest.mark.parametrize("kind", _KILLS)
def test_a_table_of_files_is_whole_whenever_its_publisher_is_killed(
    spark: SparkSession, ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    places = Warehouses(tmp_path)
    if kind not in places.settings:
        pytest.skip("Iceberg's jar is not here: make iceberg")
    versions = {"old": scores(30), "new": scores(31, 6)}
    spec = load_spec("clicks", ["score.top_k=4", *places.overrides(kind)])

    def publish_to(key: str) -> None:
        df = spark.createDataFrame(versions[key], SCHEMA.format(user="bigint", item="bigint"))
        with open_target(spec, ws) as target:
            target.create(df.dtypes)
            with target.stage(df, DS, key) as staged:
                target.swap(staged, "s", [])

    def check(table: str, current: str, recorded: str) -> None:
        same(places.read(kind, ws, DS), versions[table])
        same(places.read(kind, ws, DS, current=True), versions[current])
        with open_target(spec, ws) as target:
            record = target.published(DS)
            assert record is not None
            assert (record.key, record.rows) == (recorded, len(versions[recorded]))
            assert (target.missing(DS, "new") is None) == (recorded == "new")

    with spark_settings(spark, places.properties):
        publish_to("old")
        for owner, name, left in _KILLS[kind]:
            real = getattr(owner, name)

            def dies(*args: Any, real: Any = real) -> None:
                real(*args)
                raise Killed

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, dies)
                with pytest.raises(Killed):
                    publish_to("new")
            check(*left.split())
        publish_to("new")
        check("new", "new", "new")


def test_a_day_of_delta_is_not_replaced_by_a_run_that_was_paused(
    spark: SparkSession, ws: Workspace, tmp_path: Path
) -> None:
    spec = load_spec("clicks", ["score.top_k=4", *Warehouses(tmp_path).overrides("delta")])
    frames = {"before": scores(20), "old": scores(21, 1), "new": scores(22, 2)}

    def publish_to(key: str, lock: RunLock, later: RunLock | None = None) -> None:
        df = spark.createDataFrame(frames[key], SCHEMA.format(user="bigint", item="bigint"))
        with open_target(spec, ws, lock) as target:
            target.create(df.dtypes)
            with target.stage(df, DS, key) as staged:
                if later is not None:
                    with open_target(spec, ws, later) as later_target:
                        later_target.claim()
                target.swap(staged, "s", [])

    with open_target(spec, ws, holding(1)) as first:
        first.claim()
        # Before there is a day: a table without rows, and nobody takes it for one.
        assert (first.days(), first.rows_with("user_id", [0]), first.leftovers("user_id", [0])) == ([], {}, 0)
        assert first.erase("user_id", [0]) == ""
        with pytest.raises(UserError, match="there is no table"):
            first.sample(DS, 1)
        with pytest.raises(LeaseLost):
            publish_to("old", holding(0))
    publish_to("before", holding(1))
    with pytest.raises(LeaseLost, match="a later holder of the lease has committed"):
        publish_to("old", holding(1), later=holding(2))
    for current in (False, True):
        same(Warehouses(tmp_path).read("delta", ws, DS, current=current), frames["before"])
    publish_to("new", holding(2))
    for current in (False, True):
        same(Warehouses(tmp_path).read("delta", ws, DS, current=current), frames["new"])
