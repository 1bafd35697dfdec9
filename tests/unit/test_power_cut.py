"""The order of writes to the disk, and how a home goes on from what a power cut or a bad disk has left of it.

The order of syncs is seen by the calls; damage is done by hand: a file is emptied, cut off or filled with zeros.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.dataset.layout import LISTING
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.lake.delta.day_table import verify_day
from headrace.lake.delta.log import DeltaLog, check_files
from headrace.lake.delta.log_files import newest_checkpoint, set_torn_aside
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.lake.delta.with_spark import read_version
from headrace.lake.landing.load_history import LoadHistory, LoadRecord, row_counts
from headrace.models.predictor import damaged_model
from headrace.models.registry.client import missing_version
from headrace.publish.stage import Publish
from headrace.score.stage import ScoreCandidates
from headrace.stage import Context, Stage, run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.storage import Location, local, system
from headrace.storage.host_scratch import create_once
from tests.unit.test_delta_transaction import FIELDS, add
from tests.unit.test_stage import DS, Fake

#: What a power cut may leave of a file's bytes.
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of all syncs and of all names that appear, in order."""
    seen: list[tuple[str, str]] = []

    def record(name: str, path_of: Callable[..., Path]) -> None:
        real = getattr(system, name)

        def call(*arguments: Any) -> Any:
            seen.append((name, str(path_of(*arguments))))
            return real(*arguments)

        monkeypatch.setattr(system, name, call)

    record("fsync", lambda path: path)
    record("sync_file_system", lambda path: path)
    record("replace", lambda source, target: target)
    record("rename_new", lambda source, target: target)
    return seen


def day_table(tmp_path: Path, days: int = 2, table: str = "events") -> Location:
    """A table with a data file a day, each written by a commit of its own."""
    folder = local(tmp_path / "lake" / "shop" / table)
    create_table(folder, FIELDS, ["ds"])
    for number in range(1, days + 1):
        commit_day(folder, f"d{number}")
    return folder


def commit_day(folder: Location, ds: str) -> int:
    (folder / f"ds={ds}" / "a.parquet").transient().put_text("nine bytes"[:9])
    record = LoadRecord(ds, "key", "declared", "judged", [], {"kept": 1})
    return Transaction(folder).replace("ds", [ds], [add(ds, "a.parquet")], record.metadata())


def commit_path(folder: Location, version: int) -> Path:
    return folder.local_path() / "_delta_log" / f"{version:020d}.json"


# --- the order of syncs ---------------------------------------------------------------------------------------------


def test_data_files_are_on_the_disk_before_the_commit_that_names_them(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    folder = day_table(tmp_path, 0)
    calls.clear()
    commit_day(folder, "d1")
    committed = calls.index(("rename_new", str(commit_path(folder, 1))))
    synced = [path for call, path in calls[:committed] if call == "fsync"]
    data, day, table = f"{folder}/ds=d1/a.parquet", f"{folder}/ds=d1", str(folder)
    assert synced.index(data) < synced.index(day) < synced.index(table)
    assert synced[-1].endswith(".partial")
    assert calls[committed + 1] == ("fsync", f"{folder}/_delta_log")


def test_folders_that_are_made_on_the_way_are_on_the_disk_too(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    (local(tmp_path) / "a" / "b" / "c").put_text("1")
    with (local(tmp_path) / "m" / "n" / "folder").new_folder() as folder:
        (folder / "f").put_text("1")
    synced = [path.removeprefix(str(tmp_path)) for call, path in calls if call == "fsync"]
    assert {"", "/a", "/a/b", "/m", "/m/n"} <= set(synced)


def test_the_file_system_is_synced_between_the_work_and_the_manifest(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    ws = Workspace(tmp_path / "home")
    run_stage(Fake(), load_spec("clicks"), ws, DS)
    kinds = [call for call, path in calls if call == "sync_file_system" or path.endswith(f"{DS}/features.json")]
    assert kinds == ["sync_file_system", "rename_new"]


def test_lake_and_store_on_disks_of_their_own_are_synced_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm stands for the second disk."""
    synced: list[str] = []
    monkeypatch.setattr(system, "sync_file_system", lambda path: synced.append(str(path)))
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system holds both")
    Workspace(tmp_path, lake_uri="/dev/shm/headrace-test-no-such-folder").sync()
    assert sorted(synced) == sorted(["/dev/shm", str(tmp_path)])


def test_a_system_without_syncfs_syncs_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(system, "_syncfs", lambda: None)
    monkeypatch.setattr(os, "sync", lambda: synced.append(1))
    system.sync_file_system(tmp_path)
    assert synced == [1]


# --- a torn log -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_commit_at_the_end_of_a_log_is_none_and_the_next_one_takes_its_place(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = day_table(tmp_path)
    path = commit_path(folder, 2)
    torn = DAMAGE[damage](path.read_bytes())
    path.write_bytes(torn)
    path.with_name(f".{path.name}.crc").write_bytes(b"hadoop's")
    path.with_suffix(".crc").write_bytes(b"delta's")
    log = DeltaLog(folder)
    assert (log.version, log.has(2), log.has(1)) == (1, False, True)
    assert list(LoadHistory(log).records) == ["d1"]
    assert commit_day(folder, "d2") == 2
    assert sorted(LoadHistory(DeltaLog(folder)).records) == ["d1", "d2"]
    assert f"{path} is not whole ({len(torn):,} bytes)" in caplog.text
    assert path.with_name(f"{path.name}.damaged").read_bytes() == torn
    assert not path.with_suffix(".crc").exists()
    assert not path.with_name(f".{path.name}.crc").exists()


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 10_000))
def test_a_commit_that_is_cut_anywhere_is_whole_or_none(length: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An independent reader sees whole lines of JSON, the last one perhaps without its end of line."""
    folder = day_table(tmp_path_factory.mktemp("cut"))
    path = commit_path(folder, 2)
    data = path.read_bytes()
    cut = data[: length % len(data)]
    path.write_bytes(cut)
    try:
        actions = [json.loads(line) for line in cut.decode().split("\n") if line]
    except ValueError:
        actions = []
    # Actions that are missing at the end cannot be told from a commit without them: the folder's sync keeps those out.
    assert DeltaLog(folder).version == (2 if actions else 1)


def test_what_a_commit_that_is_gone_has_left_goes_too(tmp_path: Path) -> None:
    """Delta refuses a state that does not fit the checksum of its version."""
    folder = day_table(tmp_path)
    stale = commit_path(folder, 2).with_suffix(".crc")
    commit_path(folder, 2).unlink()
    stale.write_text("{}")
    checksum_file = commit_path(folder, 1).with_suffix(".crc")
    checksum_file.write_text("{}")
    assert commit_day(folder, "d2") == 2
    assert (stale.exists(), checksum_file.exists()) == (False, True)


def test_a_damaged_commit_with_whole_ones_after_it_is_refused_by_name(tmp_path: Path) -> None:
    folder = day_table(tmp_path)
    path = commit_path(folder, 1)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"{path} is damaged: its 0 bytes are no commit"):
        DeltaLog(folder).files(2)
    assert path.stat().st_size == 0


def test_a_log_of_which_nothing_is_left_is_refused_and_no_table_is_made_in_its_place(tmp_path: Path) -> None:
    """Its first commits went when they were old."""
    folder = day_table(tmp_path)
    commit_path(folder, 0).unlink()
    commit_path(folder, 1).unlink()
    commit_path(folder, 2).write_bytes(b"")
    with pytest.raises(UserError, match=r"2\.json is damaged \(0 bytes\), and nothing before it is in the log"):
        create_table(folder, FIELDS, ["ds"])


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_passed_over_and_goes(damage: str, tmp_path: Path) -> None:
    folder = day_table(tmp_path)
    log = folder.local_path() / "_delta_log"
    file = log / f"{2:020d}.checkpoint.parquet"
    file.write_bytes(DAMAGE[damage](b"PAR1" + bytes(100) + b"PAR1"))
    (log / "_last_checkpoint").write_text('{"version": 2}')
    assert newest_checkpoint(folder / "_delta_log", 2) is None
    assert {f.partition["ds"] for f in DeltaLog(folder).files(2) or ()} == {"d1", "d2"}
    set_torn_aside(folder)
    assert not file.exists()
    assert not (log / "_last_checkpoint").exists()
    assert DeltaLog(folder).version == 2


def test_a_torn_commit_of_somebody_elses_table_is_not_passed_over(tmp_path: Path) -> None:
    folder = day_table(tmp_path)
    commit_path(folder, 2).write_bytes(b"")
    assert DeltaLog(folder.as_plain()).version == 2
    with pytest.raises(UserError, match="is damaged"):
        DeltaLog(folder.as_plain()).files(2)


# --- data files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "cut"])
def test_a_short_data_file_is_told_with_both_sizes_and_never_read(damage: str, tmp_path: Path) -> None:
    folder = day_table(tmp_path)
    assert row_counts(DeltaLog(folder), 2, {"d1", "d2"}) == {"d1": 1, "d2": 1}
    file = folder.local_path() / "ds=d2" / "a.parquet"
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    message = f"{file} has {file.stat().st_size} bytes, not 9"
    history = LoadHistory(DeltaLog(folder))
    assert (history.state("d1").damage, history.state("d2").damage) == (None, message)
    assert row_counts(DeltaLog(folder), 2, {"d1", "d2"}) is None
    ws, output = Workspace(tmp_path), Output(kind="delta", name="lake/shop/events", version="2", rows=1)
    assert verify_day(ws, output, "d1") is None
    assert verify_day(ws, output, "d2") == message
    with pytest.raises(UserError, match=message):
        check_files(folder, DeltaLog(folder).files(2) or ())
    # Before Spark is asked.
    with pytest.raises(UserError, match=message):
        read_version(None, folder, 2, lambda partition: partition["ds"] == "d2")  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [ScoreCandidates(), Publish(), BuildFeatures()], ids=lambda stage: str(stage.name))
def test_a_stage_does_not_stand_on_a_short_file_of_its_table(stage: Stage, tmp_path: Path) -> None:
    """Scores, published scores, and statistics of a dataset; without Spark, and before the warehouse is asked."""
    table = {"score": "scores", "publish": "published", "features": "statistics"}[stage.name]
    folder = day_table(tmp_path, table=table)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / LISTING).write_text("[]")
    outputs = (
        Output(kind="delta", name=f"lake/shop/{table}", version="2", rows=1),
        Output(kind="dataset", name="dataset", version="k"),
    )
    manifest = Manifest(stage=stage.name, pipeline="shop", ds="d2", key="k", spec_hash="", outputs=outputs)
    ctx = Context(load_spec("clicks", ["pipeline=shop"]), Workspace(tmp_path), "d2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.publish.stage.open_target", lambda *_: pytest.fail("the warehouse was asked"))
        patch.setattr("headrace.features.build.stage.damage_of", lambda *_: None)
        for damage in ("empty", "cut"):
            file = folder.local_path() / "ds=d2" / "a.parquet"
            content = file.read_bytes()
            file.write_bytes(DAMAGE[damage](content))
            assert stage.verify(ctx, manifest) == f"{file} has {file.stat().st_size} bytes, not 9"
            file.write_bytes(content)
        # Another day's file is not this day's matter.
        (folder.local_path() / "ds=d1" / "a.parquet").write_bytes(b"")
        if stage.name != "publish":
            assert stage.verify(ctx, manifest) is None


def test_a_mapped_folder_with_a_short_file_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []

    def make(folder: Location) -> None:
        runs.append(1)
        (folder / "deep" / "rows").put_bytes(b"12345678")

    place = local(tmp_path / "maps" / "tables")
    for _ in range(2):
        assert (create_once(place, make) / "deep" / "rows").read_bytes() == b"12345678"
    assert runs == [1]
    file = place.local_path() / "deep" / "rows"
    file.write_bytes(b"1234")
    assert (create_once(place, make) / "deep" / "rows").read_bytes() == b"12345678"
    assert runs == [1, 1]
    assert f"{file} has 4 bytes, not 8: {place} is made again" in caplog.text


# --- models and their registry --------------------------------------------------------------------------------------


def saved_model(folder: Path) -> Path:
    """A saved model as its record has it, with files of any content."""
    files = {"dense.safetensors": b"dense" * 99, "workflow/workflow.json": b"{}"}
    rows = {"weight-00000-00000.safetensors": b"rows" * 500}

    def write(folder: Path, files: dict[str, bytes]) -> list[dict[str, Any]]:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return [{"name": n, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()]

    (folder / "embeddings").mkdir(parents=True)
    (folder / "embeddings" / "index.json").write_text(json.dumps({"files": write(folder / "embeddings", rows)}))
    card = {"kind": "dlrm", "model": {}, "schema": {"features": []}, "files": write(folder, files)}
    (folder / "model.json").write_text(json.dumps(card))
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["dense.safetensors", "embeddings/weight-00000-00000.safetensors", "model.json"])
def test_a_model_with_a_damaged_file_does_not_stand(damage: str, name: str, tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    assert damaged_model(local(folder)) is None
    file = folder / name
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert str(file) in (damaged_model(local(folder)) or "")


def registry(home: Path) -> Workspace:
    """An SQLite file with one version, as MLflow has its table."""
    with closing(sqlite3.connect(home / "mlflow.db")) as db, db:
        db.execute("CREATE TABLE model_versions (name TEXT, version INTEGER, filler TEXT)")
        db.executemany("INSERT INTO model_versions VALUES ('clicks', ?, ?)", [(n, "x" * 999) for n in range(1, 60)])
    return Workspace(home)


def test_the_registry_is_asked_for_the_version_that_a_manifest_names(tmp_path: Path) -> None:
    ws = registry(tmp_path)
    assert missing_version(ws, {"name": "clicks", "version": "59"}) is None
    assert missing_version(ws, None) is None
    message = f"version 60 of model 'clicks' is not in {tmp_path}/mlflow.db"
    assert missing_version(ws, {"name": "clicks", "version": "60"}) == message
    (tmp_path / "mlflow.db").write_bytes(b"")
    assert missing_version(ws, None) == f"the model registry {tmp_path}/mlflow.db has 0 bytes"
    (tmp_path / "mlflow.db").unlink()
    assert missing_version(ws, None) == "the model registry is gone"


def test_a_transaction_that_a_power_cut_ended_is_rolled_back(tmp_path: Path) -> None:
    """SQLite's journal lies beside the file: nobody can read it who may not write it."""
    run, cut = tmp_path / "run", tmp_path / "cut"
    run.mkdir()
    cut.mkdir()
    registry(run)
    with closing(sqlite3.connect(run / "mlflow.db")) as db:
        db.execute("PRAGMA cache_size = 1")  # changed pages go to the file before the transaction ends
        db.execute("DELETE FROM model_versions")
        for name in ("mlflow.db", "mlflow.db-journal"):
            shutil.copy(run / name, cut / name)
    assert missing_version(Workspace(cut), {"name": "clicks", "version": "59"}) is None


@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_a_damaged_registry_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    """Nobody can know what else was registered there."""
    ws, file = registry(tmp_path), tmp_path / "mlflow.db"
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(UserError, match=rf"{file} is damaged \([0-9,]+ bytes: ") as raised:
        missing_version(ws, None)
    assert "\n" not in str(raised.value)
