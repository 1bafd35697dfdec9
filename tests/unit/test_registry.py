"""The registry: versions by key, the champion, what MLflow itself then holds."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models import registry
from headrace.models.registry.client import Client
from headrace.models.registry.promotion import champion_of_day, promote, roll_back, settle
from headrace.models.registry.versions import (
    DS,
    KEY,
    OldRecord,
    aliases,
    by_key,
    numbered,
    old_records,
    preload,
    remove_records,
    versions,
)
from headrace.storage import local


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One store for the module: making its tables takes seconds."""
    return Workspace(tmp_path_factory.mktemp("registry"))


def test_importing_the_registry_does_not_import_mlflow() -> None:
    code = "import sys, headrace.models.registry; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_new_store_can_be_opened_by_two_at_once(home: Workspace) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(preload, [home, home])) == [None, None]
    with sqlite3.connect(home.home / "mlflow.db") as db:
        assert db.execute("SELECT count(*) FROM registered_models").fetchone() == (0,)


def test_versions_by_key_move_no_alias(home: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    empty_home = Workspace(home.home / "none")  # no store yet
    assert registry.champion(empty_home, "clicks") is None
    assert (versions(empty_home, "clicks"), aliases(empty_home, "clicks")) == ([], {})
    assert (versions(home, "clicks"), aliases(home, "clicks")) == ([], {})
    metrics = {"auc": 0.71, "hr_at_k": None, "calibration": math.nan}
    first = registry.register(
        home, "clicks", local(home.home / "a"), metrics, "k1", params={"dim": 16}, ds="2026-01-10"
    )
    repeated = registry.register(
        home, "clicks", local(home.home / "a"), metrics, "k1", params={"dim": 16}, ds="2026-01-10"
    )
    assert first == repeated == "1"
    lineage = {"dataset": "d1", "train_days": None, "warm_start": "k1"}
    assert registry.register(home, "clicks", local(home.home / "b"), {"auc": 0.7}, "k2", lineage=lineage) == "2"
    assert registry.register(home, "clicks-baseline", local(home.home / "c"), {}, "k1") == "1"
    assert registry.champion(home, "clicks") is None
    tags = {"headrace.key": "k1", "headrace.status": "registered", "headrace.ds": "2026-01-10"}
    initial, later = versions(home, "clicks")
    assert initial == registry.Version("clicks", "1", local(home.home / "a"), "k1", "2026-01-10", {"auc": 0.71}, tags)
    assert (later.key, later.ds, later.status) == ("k2", None, "registered")
    of_two = {"headrace.dataset": "d1", "headrace.warm_start": "k1", "headrace.warm_start_version": "1"}
    assert of_two.items() <= later.tags.items()
    assert "headrace.train_days" not in later.tags
    assert by_key(home, "clicks", "k2") == later == numbered(home, "clicks", "2")
    assert by_key(home, "clicks", "k9") is None
    assert "INFO" not in capfd.readouterr().err
    with sqlite3.connect(home.home / "mlflow.db") as db:
        assert db.execute("select name, version from model_versions order by 1, 2").fetchall() == [
            ("clicks", 1),
            ("clicks", 2),
            ("clicks-baseline", 1),
        ]
        assert db.execute("select key, value from params").fetchall() == [("dim", "16")]


def test_a_version_that_somebody_else_registered_is_named_or_passed_over(home: Workspace) -> None:
    registered = registry.register(home, "shared", local(home.home), {"auc": 0.6}, "k1", ds="2026-01-10")
    with Client(home) as client:
        foreign = str(client.create_model_version("shared", source="runs:/0123/model").version)
    assert [v.version for v in versions(home, "shared")] == [registered]
    assert by_key(home, "shared", "k1") == numbered(home, "shared", registered)
    message = rf"version {foreign} of model 'shared' was not registered by headrace .* its source is runs:/0123/model"
    with pytest.raises(UserError, match=message):
        numbered(home, "shared", foreign)
    # The next days go on beside it, and nothing goes back to it.
    second = registry.register(home, "shared", local(home.home), {"auc": 0.6}, "k2", ds="2026-01-11")
    for version in (registered, second):
        settle(home, "shared", version)
    assert champion_of_day(home, "shared", "2026-01-09") is None
    assert roll_back(home, "shared").now == registered
    with Client(home) as client:
        client.set_registered_model_alias("shared", "champion", foreign)
    with pytest.raises(UserError, match=message):
        registry.champion(home, "shared")
    assert promote(home, "shared", registered, reason="back").now == registered


def test_a_killed_registration_is_completed(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "create_model_version", killed)
        with pytest.raises(KeyboardInterrupt):
            registry.register(home, "killed", local(home.home / "a"), {"auc": 0.6}, "k9")
    assert registry.champion(home, "killed") is None
    assert registry.register(home, "killed", local(home.home / "a"), {"auc": 0.6}, "k9") == "1"
    with sqlite3.connect(home.home / "mlflow.db") as db:
        runs = "select count(*) from tags where key = 'headrace.key' and value = 'k9'"
        assert db.execute(runs).fetchall() == [(1,)]


def test_a_store_whose_making_was_killed_is_made_anew(tmp_path: Path, home: Workspace) -> None:
    """A kill amid SQLite's migrations leaves tables, and no record of which were made."""
    ws = Workspace(tmp_path / "home")
    ws.store.make_dir()
    preload(home)
    (ws.home / "mlflow.db").write_bytes((home.home / "mlflow.db").read_bytes())
    with sqlite3.connect(ws.home / "mlflow.db") as db:
        for table in ("model_versions", "model_version_tags", "registered_models", "alembic_version", "runs"):
            db.execute(f"DROP TABLE {table}")
    assert registry.register(ws, "clicks", local(ws.home / "a"), {"auc": 0.7}, "k1", ds="2026-01-10") == "1"
    # One that holds a model is left to its owner.
    with sqlite3.connect(ws.home / "mlflow.db") as db:
        db.execute("DROP TABLE model_versions")
    with pytest.raises(UserError, match="cannot be used"):
        registry.register(ws, "clicks", local(ws.home / "a"), {"auc": 0.7}, "k2", ds="2026-01-11")


def test_a_new_store_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ws = Workspace(tmp_path / "home")

    def killed(*_: object) -> None:
        assert not (ws.home / "mlflow.db").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mlflow.store.db.utils._upgrade_db", killed)
        with pytest.raises(KeyboardInterrupt):
            preload(ws)
    assert not (ws.home / "mlflow.db").exists()
    preload(ws)
    with sqlite3.connect(ws.home / "mlflow.db") as db:
        assert db.execute("SELECT count(*) FROM registered_models").fetchone() == (0,)


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    ws = Workspace(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(UserError, match=r"mlflow.db cannot be used .*move it away"):
        registry.register(ws, "clicks", local(tmp_path), {}, "k")


def rows_of(home: Workspace) -> list[str]:
    """All rows of all of MLflow's tables, as text."""
    with sqlite3.connect(home.home / "mlflow.db") as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [str((table, *row)) for table in tables for row in db.execute(f'SELECT * FROM "{table}"')]


def test_old_trainings_go_for_good(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    days = [f"2026-02-0{n}" for n in range(1, 6)]
    history = [{"step": n, "auc": 0.5 + n / 10} for n in range(3)]
    untouched = rows_of(home)
    for ds in days:
        registry.register(home, "old", local(home.home / ds), {"auc": 0.7}, f"k-{ds}", ds=ds, history=history)
    with Client(home) as client:
        client.set_registered_model_alias("old", "mine", "2")
        runs = {v.version: v.run_id for v in client.search_model_versions("name = 'old'")}
        experiment = client.get_experiment_by_name("old").experiment_id
        unregistered = client.create_run(experiment, tags={KEY: "killed", DS: days[0]}).info.run_id
    arguments = (home, "old", days[3], {days[2]})
    old_record = OldRecord(days[0], "1", runs[1])
    assert old_records(*arguments) == [OldRecord(days[0], None, unregistered), old_record]
    with monkeypatch.context() as m:  # killed between a version and its run
        m.setattr("headrace.models.registry.versions._remove_run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remove_records(home, "old", [old_record])
    records = old_records(*arguments)
    assert {(r.version, r.run_id) for r in records} == {(None, unregistered), (None, runs[1])}
    for _ in range(2):
        remove_records(home, "old", records)
    assert old_records(*arguments) == []
    left = rows_of(home)
    assert not [row for row in left if str(runs[1]) in row or unregistered in row or days[0] in row]
    for version in (2, 3, 4, 5):
        assert [row for row in left if str(runs[version]) in row and row.startswith("('latest_metrics'")]
    assert [v.version for v in versions(home, "old")] == ["2", "3", "4", "5"]
    assert set(untouched) <= set(left)
    # However old, the newest stays: numbers are not given twice.
    assert [r.version for r in old_records(home, "old", "2027-01-01", ())] == ["3", "4"]
    assert old_records(Workspace(home.home / "none"), "old", days[3], ()) == []
    assert old_records(home, "nobody", days[3], ()) == []
    assert registry.register(home, "old", local(home.home / "x"), {}, "k-new", ds=days[4]) == "6"
