"""Folders for what tasks hand to each other: of this host, or in the lake where hosts share none."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import Spec
from headrace.lake.scratch import task_folder
from headrace.stage import Context
from headrace.workspace import Workspace
from tests.shop_support import shop_spec
from tests.storage_homes import memory_home

DAY = "2026-01-01"


def spec(scratch: str) -> Spec:
    types = {"user": "bigint", "ts": "timestamp", "click": "int"}
    return shop_spec(types, {"workflow": []}, spark={"master": "local[1]", "scratch": scratch})


def test_on_one_machine_it_is_in_scratch(tmp_path: Path) -> None:
    ctx = Context(spec("shared"), Workspace(tmp_path), DAY)
    killed = ctx.ws.spark_local / "ingest" / "shop" / "left.parquet"
    killed.put_text("of a killed run")
    with task_folder(ctx, "ingest") as folder:
        assert folder == killed.parent
        assert not killed.exists()
        with task_folder(ctx, "ingest", "ratings") as named:
            (named / "a").put_text("a")
        assert not named.exists()
        (folder / "b").put_text("b")
    assert not folder.exists()


def test_between_hosts_each_run_has_its_own_in_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_home(monkeypatch, tmp_path, readers=("s3",))
    ctx = Context(spec("own"), Workspace(tmp_path, "s3://bucket/lake", "s3://bucket/store"), DAY)
    place = ctx.ws.lake / "staging" / "shop" / "score"
    (place / "killed" / "a").put_text("of a killed run")
    (place / "killed" / "items").begin("t")
    with task_folder(ctx, "score") as paused:
        assert not list(place.files())
        (paused / "a").put_text("paused")
        # Its lease is over, and another run begins; its tasks go on for a while.
        with task_folder(ctx, "score") as folder:
            (folder / "a").put_text("mine")
            (paused / "b").put_text("late")
            assert [f.below(folder) for f in folder.files()] == ["a"]
            (folder / "items").begin("t")
            files = list(folder.files())
        assert not folder.exists()
        assert files
    assert not place.exists()
