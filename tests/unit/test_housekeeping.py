"""`headrace gc`: what stays, what goes, what says so; killed at every call that changes the disk."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from bench.simulated_days import day, run_day, save, users_at, write_rows
from headrace.cli import app
from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import BusyError, UserError
from headrace.jobs.housekeeping.folders import kept_models, versions_with_aliases
from headrace.jobs.housekeeping.workspace_state import WorkspaceState, manifests_of, size_of
from headrace.lake.delta.compact import crowded
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.retention import days_before, remove_days_before, unused_files
from headrace.lake.delta.transaction import create_table
from headrace.lake.landing.load_history import LoadHistory
from headrace.models import registry
from headrace.models.predictor import file_digest
from headrace.models.registry.client import Client
from headrace.models.registry.promotion import Promotion, roll_back, settle
from headrace.models.registry.versions import CHAMPION
from headrace.quality.report.lineage import find, load_runs, trace
from headrace.stage import identity, run_lock
from headrace.stage.manifest import Manifest, Output
from headrace.storage import Location
from tests.cli_support import DS, make_yard
from tests.storage_support import Killed, clicks, faulty, gc

DAYS = 8
SPEC: dict[str, Any] = {
    "datasets": 2,
    "models": 3,
    "before_champion": 1,
    "checkpoints": 1,
    "logs": 2,
    "reports": 4,
    "versions": 2,
    "tables": {"scores": 3},
}


@pytest.fixture(scope="module")
def filled_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days of a pipeline."""
    ws = Workspace(tmp_path_factory.mktemp("made") / "home")
    for n in range(DAYS):
        run_day(ws, day(n), size=20)
    return ws.home


@pytest.fixture(scope="module")
def registered(filled_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the first three days' models in the registry, of which the second is the champion."""
    ws = copy(filled_home, tmp_path_factory.mktemp("registered"))
    for n in range(3):
        model = ws.model("clicks", day(n), f"train-{day(n)}") / "model"
        registry.register(ws, "clicks", model, {"auc": 0.7}, f"train-{day(n)}", ds=day(n))
    for version in ("1", "2"):
        settle(ws, "clicks", version)
    return ws.home


def copy(source: Path, to: Path) -> Workspace:
    shutil.copytree(source, to / "home")
    return Workspace(to / "home")


def days_of(ws: Workspace, kind: str) -> list[str]:
    return sorted(p.name for p in (ws.store / kind / "clicks").entries())


def readable(spec: Spec, ws: Workspace) -> None:
    """Whatever a manifest names, and does not say is removed, is there; each table's newest version is whole."""
    for _, manifest in manifests_of(ws, "clicks"):
        removed_names = {r.name for r in manifest.removed}
        for output in manifest.outputs:
            if output.name in removed_names:
                continue
            place = ws.locate(output.name)
            if output.kind in ("dataset", "model", "file"):
                assert place.exists(), output
                assert size_of(place) > 0, output
            elif output.kind == "delta" and manifest.ds >= day(DAYS - spec.housekeeping.versions):
                assert users_at(place, int(output.version), manifest.ds) == list(range(20)), output
    for name in ("events", "quarantine", "scores"):
        log = DeltaLog(ws.table("clicks", name))
        assert log.version is not None
        for file in log.files(log.version) or []:
            assert pq.read_metadata(file.path.local_path()).num_rows == file.rows


def test_what_goes_and_what_stays(registered: Path, tmp_path: Path) -> None:
    spec, ws = clicks(**SPEC), copy(registered, tmp_path)
    contents = {p: p.read_bytes() for p in ws.home.rglob("*") if p.is_file()}
    listed_steps = gc(spec, ws, delete=False)
    assert {p: p.read_bytes() for p in ws.home.rglob("*") if p.is_file()} == contents  # dry
    steps = gc(spec, ws)
    assert {s.kind for s in steps} == {
        *("dataset", "model", "checkpoints", "mapped", "report", "log", "unfinished", "rows", "vacuum")
    }
    assert {s.name for s in listed_steps if s.kind != "vacuum"} <= {s.name for s in steps}
    assert days_of(ws, "datasets") == [day(6), day(7)]
    # The champion, one before it, and three days; where the registry has the whole path of another folder, too.
    assert days_of(ws, "models") == [day(0), day(1), day(5), day(6), day(7)]
    assert [d.name for d in (ws.scratch / "logs" / "clicks").entries()] == [day(6), day(7)]
    assert [d.stem for d in (ws.store / "reports" / "clicks").entries()] == [day(n) for n in (4, 5, 6, 7)]
    model_folders = [ws.model("clicks", day(n), f"train-{day(n)}") for n in (0, 1, 5, 6, 7)]
    assert [(k / "checkpoints").exists() for k in model_folders] == [False, False, False, False, True]
    readable(spec, ws)
    events = DeltaLog(ws.table("clicks", "events"))
    assert {f.partition["ds"] for f in events.files(events.version or 0) or []} == {day(n) for n in range(DAYS)}
    scores = DeltaLog(ws.table("clicks", "scores"))
    assert {f.partition["ds"] for f in scores.files(scores.version or 0) or []} == {day(5), day(6), day(7)}
    assert len([p for p in ws.table("clicks", "scores").files() if p.suffix == ".parquet"]) == 3
    removed = {(m.ds, m.stage) for _, m in manifests_of(ws, "clicks") if m.removed}
    assert ("2026-01-01", "train") not in removed
    assert removed == {
        *((day(n), "features") for n in range(6)),
        *((day(n), "train") for n in (2, 3, 4)),
        *((day(n), "score") for n in range(5)),
        *((day(n), "report") for n in range(4)),
    }
    assert gc(spec, ws) == []


def test_a_moved_workspace_keeps_its_champion(registered: Path, tmp_path: Path) -> None:
    ws = copy(registered, tmp_path)
    reasons = kept_models(WorkspaceState(clicks(**SPEC), ws, datetime.now(UTC)))
    assert reasons[ws.model("clicks", day(1), f"train-{day(1)}") / "model"] == "version 2 is @champion"
    assert reasons[ws.model("clicks", day(0), f"train-{day(0)}") / "model"] == "version 1 is before the champion"
    assert [(v.version, aliases) for v, aliases in versions_with_aliases(ws, "clicks")] == [
        ("1", ()),
        ("2", (CHAMPION,)),
        ("3", ()),
    ]


def test_a_rollback_finds_its_target_after_gc(registered: Path, tmp_path: Path) -> None:
    """Refused ones and challengers are nothing to go back to; a day that was trained late is before later ones."""
    spec, ws = clicks(**{**SPEC, "models": 1}), copy(registered, tmp_path)
    for n in (4, 3, 5, 6):  # versions 4 to 7
        model = ws.model("clicks", day(n), f"train-{day(n)}") / "model"
        registry.register(ws, "clicks", model, {"auc": 0.7}, f"train-{day(n)}", ds=day(n))
    for version, passed in (("3", True), ("4", True), ("5", True), ("6", False), ("7", True)):
        settle(ws, "clicks", version, passed=passed)
    gc(spec, ws)
    assert days_of(ws, "models") == [day(4), day(6), day(7)]
    assert roll_back(ws, "clicks") == Promotion("7", "4")


def test_models_that_others_name_stay(registered: Path, tmp_path: Path) -> None:
    """The challenger, an experiment's arms, a number in score.model, the first model of a second stage."""
    ws = copy(registered, tmp_path)
    for n in (3, 4, 5):  # versions 4 to 6
        model = ws.model("clicks", day(n), f"train-{day(n)}") / "model"
        registry.register(ws, "clicks", model, {"auc": 0.7}, f"train-{day(n)}", ds=day(n))
    with Client(ws) as client:
        client.set_registered_model_alias("clicks", "challenger", "5")
    keep = {"models": 1, "before_champion": 0}
    sets = [f"housekeeping.{key}={json.dumps(value)}" for key, value in keep.items()]
    experiment = {"arms": {"now": {}, "old": {"model": "3"}, "new": {"model": "@challenger"}}}
    sets += ["publish=null", "score.model=4", f"experiments={json.dumps({'ranker': experiment})}", "outcomes={}"]
    reasons = kept_models(WorkspaceState(load_spec("clicks", sets), ws, datetime.now(UTC)))
    assert {m.below(ws.store).split("/")[2]: reason for m, reason in reasons.items() if m.is_below(ws.store)} == {
        day(1): "version 2 is @champion",
        day(2): "version 3 is named by experiments.ranker.arms.old",
        day(3): "version 4 is named by score.model",
        day(4): "version 5 is @challenger",
        day(7): f"of {day(7)}",
    }
    # Trees behind a network of the same day, of a day that is kept, name it by its run.
    trees = ws.model("clicks", day(7), "second") / "model"
    first = ws.model("clicks", day(7), f"train-{day(7)}") / "model"
    for part in ("model.ubj", "workflow/workflow.json"):
        (trees / part).put_text("{}")
    named = {"key": f"train-{day(7)}", "sha256": file_digest(first / "model.json")}
    (trees / "model.json").put_text(json.dumps({"kind": "second_stage", "first": named}))
    output = Output(kind="model", name=ws.name_of(trees), version="second")
    save(ws, day(7), "second_stage", {}, output)
    file = ws.manifest("clicks", day(7), "train")
    file.remove()
    reasons = kept_models(WorkspaceState(clicks(**keep), ws, datetime.now(UTC)))
    assert reasons[first] == f"{ws.name_of(trees)} rests on it (of {day(7)})"


def test_hashes_of_users_are_kept_for_the_next_run_alone(filled_home: Path, tmp_path: Path) -> None:
    spec, ws = clicks(**SPEC), copy(filled_home, tmp_path)
    gc(spec, ws)
    log = DeltaLog(ws.table("clicks", "score_inputs"))
    assert log.version is not None
    assert {f.partition["ds"] for f in log.files(log.version) or []} == {day(DAYS - 2), day(DAYS - 1)}
    assert len([p for p in log.folder.files() if p.suffix == ".parquet"]) == 2
    # Scores do without what they were made of: the days stand.
    score = Manifest.load(ws.manifest("clicks", day(DAYS - 3), "score"))
    assert score is not None
    assert score.removed == ()
    # The newest day stays, whatever came after it.
    for n in range(DAYS, DAYS + 5):
        save(ws, day(n), "ingest", {})
    gc(spec, ws)
    log = DeltaLog(ws.table("clicks", "score_inputs"))
    assert log.version is not None
    assert {f.partition["ds"] for f in log.files(log.version) or []} == {day(DAYS - 1)}


def test_what_a_kept_model_rests_on_stays(tmp_path: Path) -> None:
    spec, ws = clicks(models=1), Workspace(tmp_path)
    for n, base in enumerate((None, None, day(1), None, day(2))):
        run_day(ws, day(n), size=5, base=base)
    gc(spec, ws)
    assert days_of(ws, "models") == [day(1), day(2), day(4)]
    for model in kept_models(WorkspaceState(spec, ws, datetime.now(UTC))):
        assert (model / "model.json").is_file()


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "killed"])
def test_killed_at_any_call(filled_home: Path, tmp_path: Path, kills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = clicks(**SPEC)
    monkeypatch.setattr("headrace.jobs.housekeeping.folders.versions_with_aliases", _versions)
    uninterrupted = copy(filled_home, tmp_path / "whole")
    gc(spec, uninterrupted)
    expected = sorted(str(p.relative_to(uninterrupted.home)) for p in uninterrupted.home.rglob("*") if p.is_file())
    is_done = False
    # Of the many that remove one file each every fourteenth, and where it kills those half-way between.
    for n in chain(range(1, 13), count(13 + 7 * kills, 14)):
        if is_done:
            break
        ws = copy(filled_home, tmp_path / str(n))
        with faulty(n, kills):
            try:
                gc(spec, ws)
                is_done = True
            except (OSError, Killed):
                pass
        readable(spec, ws)
        gc(spec, ws)
        readable(spec, ws)
        remaining = sorted(str(p.relative_to(ws.home)) for p in ws.home.rglob("*") if p.is_file())
        assert _plain(remaining) == _plain(expected), n
        shutil.rmtree(ws.home)
    assert n > 30


def _versions(ws: Workspace, name: str) -> list[tuple[object, tuple[str, ...]]]:
    """Return versions as the registry has them, without a database that is opened in each of a hundred copies."""
    from headrace.models.registry.versions import Version

    if name != "clicks":
        return []
    champion = {1: (CHAMPION,)}
    return [
        (
            Version(name, str(n + 1), ws.model(name, day(n), f"train-{day(n)}") / "model", "", None, {}),
            champion.get(n, ()),
        )
        for n in range(3)
    ]


def _plain(names: list[str]) -> list[str]:
    """Return the file names without those of locks."""
    return [n for n in names if "mlflow" not in n]


def test_at_work(registered: Path, tmp_path: Path) -> None:
    spec, ws = clicks(**SPEC), copy(registered, tmp_path)
    with run_lock(ws, "clicks"):
        with pytest.raises(BusyError):
            gc(spec, ws)
        assert gc(spec, ws, delete=False)
        assert len(days_of(ws, "datasets")) == DAYS
    # A search keeps what it works on; another pipeline's run keeps the models that it has ever begun with.
    search = ws.search("clicks", day(0), "k") / "study.db"
    search.put_text("x")
    other_manifest = Manifest(stage="train", pipeline="other", ds=day(0), key="k", spec_hash="s")
    read = {"kind": "pretrained", "name": f"models/clicks/{day(3)}/train-{day(3)}/model", "version": "v"}
    other_manifest = Manifest.model_validate(other_manifest.model_dump() | {"inputs": [read]})
    other_manifest.save(ws.manifest("other", day(0), "train"))
    with run_lock(ws, "clicks-search"), run_lock(ws, "other"):
        gc(spec.model_copy(update={"housekeeping": spec.housekeeping.model_copy(update={"searches": 1})}), ws)
    assert search.exists()
    assert days_of(ws, "models") == [day(0), day(1), day(3), day(5), day(6), day(7)]
    gc(spec.model_copy(update={"housekeeping": spec.housekeeping.model_copy(update={"searches": 1})}), ws)
    assert not search.exists()
    assert days_of(ws, "models") == [day(0), day(1), day(5), day(6), day(7)]


def test_removed_is_neither_stale_nor_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yard = make_yard(tmp_path, monkeypatch)
    assert yard.run().exit_code == 0
    ws = Workspace(yard.home)
    file = ws.manifest("clicks", DS, "features")
    features = Manifest.load(file)
    assert features is not None
    noted = features.with_removed({"lake/clicks/features"})
    noted.save(file)
    assert noted.with_removed({"lake/clicks/features"}) is noted
    assert identity(noted) == identity(features)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    line = next(x for x in yard("status", "clicks").output.splitlines() if " features " in x)
    assert f"removed: lake/clicks/features was removed by retention on {today}" in line
    later = next(x for x in yard("status", "clicks").output.splitlines() if " train " in x)
    assert " done " in later
    runs = load_runs(ws, "clicks")
    tree = trace(runs, *find(runs, "lake/clicks/score"))
    assert f"was removed by retention on {today}" in str(tree)
    assert yard.run().exit_code == 0
    assert yard.submitted == ["features"]  # made again, with the same result: nothing else is
    assert Manifest.load(file).removed == ()  # type: ignore[union-attr]


def test_days_of_events_that_are_removed(tmp_path: Path) -> None:
    """Readers see removed days as not loaded; days that stay are as they were, and keep their versions."""
    ws = Workspace(tmp_path)
    table = ws.table("clicks", "events")
    for n in range(4):
        record = {"ds": day(n), "key": "k", "declared": "d", "judged": "j", "files": [], "rows": {"kept": 2}}
        write_rows(table, day(n), [1, 2], json.dumps({"headrace.ingest": record}))
    log = DeltaLog(table)
    versions = {n: LoadHistory(log).last_change(day(n)) for n in range(4)}
    assert days_before(table, day(2)) == [day(0), day(1)]
    assert remove_days_before(table, day(2)) == 5
    assert remove_days_before(table, day(2)) is None
    history = LoadHistory(log)
    assert set(history.records) == {day(2), day(3)}
    assert history.state(day(2)).damage is None
    assert history.removed_by_others(versions[3], day(3)) is None
    assert {n: LoadHistory(log).last_change(day(n)) for n in range(4)} == versions
    # The versions before are pinned, but for the days that are gone.
    unused = unused_files(table, {versions[3]}, day(2), 2**62)
    assert {f.parent.name for f in unused} == {f"ds={day(0)}", f"ds={day(1)}"}
    assert unused_files(table, {versions[3]}, None, 2**62) == []
    assert unused_files(table, (), None, 0) == []  # what was removed just now may be read still
    write_rows(table, day(0), [7], json.dumps({"headrace.ingest": record | {"ds": day(0)}}))
    assert set(LoadHistory(log).records) == {day(0), day(2), day(3)}  # loaded again by whoever asked for it


def test_the_log_of_a_table_that_keeps_some_days_does_not_grow(tmp_path: Path) -> None:
    """All that kept days and their versions need is told by what is left of it, to others' readers, too."""
    ws, spec = Workspace(tmp_path), clicks(tables={"scores": 4}, versions=3)
    table, name = ws.table("clicks", "scores"), ws.name_of(ws.table("clicks", "scores"))
    log, versions, sizes, days = DeltaLog(table), {}, [], [day(n) for n in range(60)]
    for n in range(60):
        version = versions[day(n)] = write_rows(table, day(n), [n, n + 1])
        save(ws, day(n), "score", {}, Output(kind="delta", name=name, version=str(version), rows=2))
        gc(spec, ws)
        sizes.append(size_of(table / "_delta_log"))
        log_versions = log.versions()
        assert log_versions == set(range(min(log_versions), max(log_versions) + 1))  # no gap
        for ds in days[max(0, n - 2) : n + 1]:
            first = days.index(ds)
            assert users_at(table, versions[ds], ds) == [first, first + 1]
        retained_days = {uri.split("ds=")[1][:10] for uri in DeltaTable(str(table)).file_uris()}
        assert retained_days == set(days[max(0, n - 3) : n + 1])
    assert min(log_versions) > 80  # of two commits a day, the removal's among them
    # A checkpoint also names files that were removed within a week, by the clock: of all sixty days, here.
    assert max(sizes[40:]) < 1.15 * max(sizes[20:40])


def test_manifests_go_when_nothing_else_of_their_day_is_left(registered: Path, tmp_path: Path) -> None:
    """The champion's day keeps all of its lineage, and so does a day with rows; by default nobody's go."""
    ws = copy(registered, tmp_path)
    keep = SPEC | {"before_champion": 0, "reports": 2}
    for table in ("events", "quarantine"):
        remove_days_before(ws.table("clicks", table), day(4))
    gc(clicks(**keep), ws)
    assert ws.days("clicks") == [day(n) for n in range(DAYS)]
    steps = gc(clicks(**keep, manifests=4), ws)
    removed_days = [s.name.split()[0] for s in steps if s.kind == "manifests"]
    # The second day's model is the champion; the last four days are kept for themselves.
    assert removed_days == [f"runs/clicks/{day(n)}" for n in (0, 2, 3)]
    assert ws.days("clicks") == [day(n) for n in (1, 4, 5, 6, 7)]
    assert {m.stage for _, m in manifests_of(ws, "clicks", [day(1)])} >= {"ingest", "features", "train", "score"}
    # What MLflow has of these days went with them, but for the newest version, after which the next is numbered.
    assert [s.name for s in steps if s.kind == "registry"] == [f"1 trainings of clicks up to {day(0)}"]
    assert [v.version for v, _ in versions_with_aliases(ws, "clicks")] == ["2", "3"]
    assert [s for s in gc(clicks(**keep, manifests=4), ws) if s.kind in ("manifests", "registry")] == []
    # A day whose rows are there stays, however old.
    other_ws = copy(registered, tmp_path / "other")
    gc(clicks(**keep, manifests=4), other_ws)
    assert other_ws.days("clicks") == [day(n) for n in range(DAYS)]


def test_limits_of_a_spec() -> None:
    with pytest.raises(UserError, match=r"housekeeping\.tables\.events: 20 days are too few"):
        clicks(tables={"events": 20})
    assert clicks(tables={"events": 40}).housekeeping.table_days("events") == 40
    assert clicks().housekeeping.table_days("events") is None


def test_crowded_partitions(tmp_path: Path) -> None:
    ws = Workspace(tmp_path)
    table = ws.table("clicks", "events")
    write_rows(table, day(0), [1])
    assert crowded(table, 1, 1 << 20)[0] == [day(0)]
    assert crowded(table, 2, 1 << 20) == ([], 0)
    assert crowded(table, 1, 1) == ([], 0)


@pytest.mark.parametrize("reason", ["has column mapping", "column 'user_id' has delta.invariants"])
def test_small_files_that_nobody_can_join(
    filled_home: Path, tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files with features that headrace does not write stay, and what comes later goes."""
    ws = copy(filled_home, tmp_path)

    def grows(name: str, mode: str, metadata: dict[str, Any]) -> Location:
        table, adds = ws.table("clicks", name), list[dict[str, Any]]()
        for n in range(2):
            with (table / f"ds={day(0)}/{n}.parquet").new_file() as file:
                pq.write_table(pa.table({"user_id": [n]}), file)
            stats = json.dumps({"numRecords": 1})
            size = (table / f"ds={day(0)}/{n}.parquet").size()
            adds.append({"path": f"ds={day(0)}/{n}.parquet", "partitionValues": {"ds": day(0)}, "size": size})
            adds[-1] |= {"modificationTime": n, "dataChange": True, "stats": stats}
        fields = [{"name": "user_id", "type": "long", "nullable": True, "metadata": metadata}]
        fields.append({"name": "ds", "type": "string", "nullable": True, "metadata": {}})
        configuration = {"delta.appendOnly": "true", "delta.columnMapping.mode": mode}
        assert create_table(table, fields, ["ds"], adds, configuration=configuration)
        return table

    mapped = reason == "has column mapping"
    left = grows("a_left", "name" if mapped else "none", {} if mapped else {"delta.invariants": "user_id > 0"})
    joined = grows("b_joined", "none", {})
    (left / "orphan.parquet").put_text("named by no commit")
    spec = clicks(compact_files=2)
    versions_with_aliases = [(s.kind, s.name) for s in gc(spec, ws, delete=False) if s.kind == "compaction"]
    assert versions_with_aliases == [("compaction", "lake/clicks/b_joined of 1 days")]
    steps = [(s.kind, s.name) for s in gc(spec, ws)]
    assert [step for step in steps if step[0] == "compaction"] == versions_with_aliases
    assert f"the small files of a table stay as they are: {left}" in caplog.text
    assert reason in caplog.text
    assert not (left / "orphan.parquet").exists()
    assert crowded(left, 2, 1 << 20)[0] == [day(0)]
    assert crowded(joined, 2, 1 << 20) == ([], 0)


def test_command(filled_home: Path, tmp_path: Path) -> None:
    ws = copy(filled_home, tmp_path)
    words = ["gc", "clicks", "--home", str(ws.home), "--set", "publish=null", "--set", "housekeeping.datasets=2"]
    text = CliRunner().invoke(app, words).output
    assert "Nothing was changed: add --delete" in text
    # Those that the newest day's training draws rows from stay, whatever the retention says.
    replay = ("features.window_days=3", "retrain={replay: {share: 0.1, days: 2}}")
    dry_run = CliRunner().invoke(app, [*words, "--json", *(a for key in replay for a in ("--set", key))]).output
    assert {s["what"] for s in json.loads(dry_run)["steps"] if s["kind"] == "dataset"} == {
        f"datasets/clicks/{day(n)}/features-{day(n)}" for n in range(2)
    }
    report = json.loads(CliRunner().invoke(app, [*words, "--delete", "--json"]).output)
    assert report["deleted"]
    assert {s["what"] for s in report["steps"] if s["kind"] == "dataset"} == {
        f"datasets/clicks/{day(n)}/features-{day(n)}" for n in range(6)
    }
    assert "nothing can go" in CliRunner().invoke(app, words).output
