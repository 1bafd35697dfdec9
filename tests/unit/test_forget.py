"""`headrace forget`: nothing of some persons is left anywhere, everything of the others is; killed at every call."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bench.simulated_days import day
from headrace.cli import app
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Spark, Spec
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_USER_ERROR, BusyError, IncompleteError, UserError
from headrace.jobs.housekeeping.forget.erase import forget, found_places
from headrace.jobs.housekeeping.forget.models import model_places
from headrace.jobs.housekeeping.forget.persons import Persons, Place
from headrace.jobs.housekeeping.forget.proof import ErasureRequest
from headrace.jobs.housekeeping.workspace_state import WorkspaceState, manifests_of
from headrace.lake.delta.day_table import verify_day
from headrace.lake.delta.log import DeltaLog
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.load_history import LoadHistory, row_counts
from headrace.models.predictor import load_predictor
from headrace.models.saved import read_card, restore
from headrace.models.sharded_model import ShardedModel
from headrace.stage import identity, run_lock
from headrace.stage.manifest import Manifest
from headrace.storage import StoreAway, local
from headrace.storage.objects import calls, copies
from tests.forget_support import DAYS, FORGOTTEN, ROWS, USERS, events, make_home, put_rows, record, shop, tables
from tests.storage_support import Killed, faulty, memory_home

NOW = datetime(2026, 1, 9, tzinfo=UTC)
PERSONS = Persons("user_id", False, frozenset(FORGOTTEN))
SPEC = shop()


@pytest.fixture(scope="module")
def made_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ws = Workspace(tmp_path_factory.mktemp("made") / "home")
    make_home(ws, SPEC)
    return ws.home


@pytest.fixture
def ws(made_home: Path, tmp_path: Path) -> Workspace:
    shutil.copytree(made_home, tmp_path / "home")
    return Workspace(tmp_path / "home")


def erase(ws: Workspace, spec: Spec = SPEC, persons: Persons = PERSONS) -> tuple[list[Place], ErasureRequest]:
    *places, (request, proof) = forget(spec, ws, persons, NOW)
    assert proof.is_file()
    return places, request  # type: ignore[return-value]


def text_of(file: Path) -> str:
    """Return all of a file as text: Parquet decoded, all else as it is."""
    if file.suffix == ".parquet" and file.read_bytes()[:4] == b"PAR1":
        return str(pq.ParquetFile(file).read().to_pylist())
    return file.read_bytes().decode("latin-1")


def files_with(home: Path, values: list[str]) -> list[str]:
    files = [f for f in home.rglob("*") if f.is_file() and any(v in text_of(f) for v in values)]
    return sorted(str(f.relative_to(home)) for f in files)


def weights(folder: Path) -> list[torch.Tensor]:
    """Return all that a training on one rank reads of a saved model: rows, states."""
    card = read_card(local(folder))
    model = ShardedModel(card.dataset_schema, card.model, LocalCollective(), 9)
    model.embeddings.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1))
    restore(model, local(folder), with_optimizer=True)
    states = [s for states_of_table in model.embeddings.states for _, s in sorted(states_of_table.items())]
    return [*model.embeddings.weights, *states, *load_file(folder / "dense.safetensors").values()]


def without_persons(rows: pa.Table) -> list[dict[str, Any]]:
    return [r for r in rows.to_pylist() if not any(g in str(v) for v in r.values() for g in FORGOTTEN)]


def test_nothing_of_them_is_left_and_all_of_the_others(ws: Workspace) -> None:
    old_tables, manifests = tables(ws.home), {m.ds + m.stage: m for _, m in manifests_of(ws, "clicks")}
    models = {d.name: weights(d / f"train-{d.name}/model") for d in (ws.home / "models/clicks").iterdir()}
    assert files_with(ws.home, FORGOTTEN)
    listed = list(found_places(SPEC, ws, PERSONS, NOW))
    assert {p.kind for p in listed if p.act} == {
        *("dataset", "training", "cache", "log", "manifest", "model", "events", "quarantine", "table", "vocabulary")
    }
    assert tables(ws.home).keys() == old_tables.keys()
    assert not ws.forgotten("clicks").exists()  # dry
    places, request = erase(ws)
    assert request.finished == NOW
    assert files_with(ws.home, FORGOTTEN) == []
    # The same places as were listed, with the same counts.
    assert {(p.kind, p.name, p.rows) for p in places} == {(p.kind, p.name, p.rows) for p in listed}
    for name, rows in tables(ws.home).items():
        if name == "vocabulary":
            old, new = (t.sort_by("code").to_pylist() for t in (old_tables[name], rows))
            same = [(a, b) for a, b in zip(old, new, strict=True) if a["value"] not in FORGOTTEN]
            assert len(same) == len(USERS) - len(FORGOTTEN)
            assert all(a == b for a, b in same)
            assert [r["code"] for r in new] == [r["code"] for r in old]
            assert len({r["value"] for r in new}) == len(USERS)
        else:
            assert rows.to_pylist() == without_persons(old_tables[name]), name
            assert rows.num_rows < old_tables[name].num_rows, name
    codes = [2 + USERS.index(u) for u in FORGOTTEN]
    for ds, old in models.items():
        folder = ws.home / f"models/clicks/{ds}/train-{ds}/model"
        new, rows = weights(folder), [c for c in range(22) if c not in codes]
        users, states = old[0].shape[0], len(old)
        assert len(new) == states
        for a, b in zip(old, new, strict=True):
            if a.shape[0] == users and a.ndim == 2:
                assert torch.equal(a[rows], b[rows])
                assert not b[codes].any()
            else:
                assert torch.equal(a, b)
        load_predictor(local(folder))
        assert not (folder.parent / "checkpoints").exists()
    assert old[0][codes].any()
    # Nothing is stale, and what is gone is said to be.
    for _, manifest in manifests_of(ws, "clicks"):
        assert identity(manifest) == identity(manifests[manifest.ds + manifest.stage])
        assert bool(manifest.removed) == (manifest.stage == "features")
    assert list(found_places(SPEC, ws, PERSONS, NOW)) == list(found_places(SPEC, ws, PERSONS, NOW))
    assert [p.kind for p in found_places(SPEC, ws, PERSONS, NOW)] == ["landing", "landing"]


def test_versions_that_manifests_pin_are_read_without_them(ws: Workspace) -> None:
    table = ws.table("clicks", "events")
    first = DeltaLog(table).files(1)
    assert first is not None
    assert [f.rows for f in first] == [ROWS]
    erase(ws)
    log = DeltaLog(table)
    history = LoadHistory(log)
    for n in range(DAYS):
        manifest = Manifest.load(ws.manifest("clicks", day(n), "ingest"))
        assert manifest is not None
        version = int(manifest.output("delta").version)
        assert row_counts(log, version, {day(n)}) == {day(n): ROWS}
        assert history.removed_by_others(version, day(n)) is None
        state = history.state(day(n))
        assert (state.damage, state.changed_by, state.rows) == (None, (), ROWS - 3 * ROWS // len(USERS))
        read = [pq.read_table(f.path) for f in log.files(version) or [] if f.partition["ds"] == day(n)]
        assert pa.concat_tables(read).to_pylist() == without_persons(events(n))
        scores = Manifest.load(ws.manifest("clicks", day(n), "score"))
        assert scores is not None
        assert verify_day(ws, scores.output("delta"), day(n)) is None
    # The version before a day was loaded again, too.
    old = [pq.read_table(f.path) for f in log.files(1) or []]
    assert pa.concat_tables(old).to_pylist() == without_persons(events(50))
    # And after somebody else is forgotten.
    erase(ws, persons=Persons("user_id", False, frozenset([USERS[5]])))
    old = [pq.read_table(f.path) for f in log.files(1) or []]
    assert pa.concat_tables(old).to_pylist() == [r for r in without_persons(events(50)) if r["user_id"] != USERS[5]]


@pytest.mark.parametrize(("kills", "points"), [(False, 8), (True, 20)], ids=["fails", "killed"])
def test_killed_at_many_calls(made_home: Path, tmp_path: Path, kills: bool, points: int) -> None:
    """At calls that are spread over all of them, the first ones among them."""
    shutil.copytree(made_home, tmp_path / "home")
    with faulty(10**9, False) as counted:
        erase(Workspace(tmp_path / "home"))
    shutil.rmtree(tmp_path / "home")
    assert counted.calls_made > 100
    expected = tables(made_home)
    for n in sorted({1, 2, 3, 5, *(counted.calls_made * k // points for k in range(1, points + 1))}):
        shutil.copytree(made_home, tmp_path / "home")
        ws = Workspace(tmp_path / "home")
        with faulty(n, kills), suppress(OSError, Killed):
            erase(ws)
        # From the first moment on nothing comes back, and what is there can be read.
        listed = ForgottenValues.load(ws.forgotten_values("clicks"))
        if files_with(ws.home, FORGOTTEN) != files_with(made_home, FORGOTTEN):
            assert listed is not None
        for folder in sorted((ws.home / "models/clicks").glob("*/*/model")):
            load_predictor(local(folder))
        for name in ("events", "scores"):
            log = DeltaLog(ws.table("clicks", name))
            assert log.version is not None
            for version in range(1, log.version + 1):
                for file in log.files(version) or []:
                    assert pq.read_metadata(file.path).num_rows == file.rows
        _, request = erase(ws)
        assert request.finished == NOW
        assert files_with(ws.home, FORGOTTEN) == [], n
        for name, rows in tables(ws.home).items():
            if name != "vocabulary":
                assert rows.to_pylist() == without_persons(expected[name]), (n, name)
        shutil.rmtree(ws.home)


def test_copies_of_a_store_on_this_host_go_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    ws = Workspace(tmp_path / "home", "s3://bucket/lake", "s3://bucket/store")
    make_home(ws, SPEC)
    # As stages of this pipeline and of another one have read them.
    for file in (*ws.lake.files(), *ws.store.files()):
        file.local_path()
    ws.table("clicks", "events").local_path()
    with ws.dataset("visits", day(0), "theirs").new_folder() as folder:
        (folder / "f").put_text("of others")
    held = (ws.dataset("visits", day(0), "theirs") / "f").local_path().open()
    fetching = copies.folder() / "files" / "0123abcd" / "killed.partial"
    fetching.parent.mkdir()
    fetching.write_text(FORGOTTEN[0])
    assert {p.parts[0] for p in map(Path, files_with(tmp_path / "cache", FORGOTTEN))} == {"files", "folders"}
    upload = copies.new_path("part-0.parquet")
    upload.write_text(FORGOTTEN[1])
    listed = [p for p in found_places(SPEC, ws, PERSONS, NOW) if str(copies.folder()) in p.name]
    assert [bool(p.left) for p in listed] == [False, True]
    # A writer that was killed an hour ago, or is at work: nobody knows. A later run removes it.
    until = datetime.fromtimestamp(upload.stat().st_mtime + 86_400, UTC)
    unfinished = rf"{upload.parent}: files on their way to the store.* from {until:%Y-%m-%d %H:%M:%S} UTC on"
    with pytest.raises(IncompleteError, match=rf"not all is erased yet: {unfinished}"):
        erase(ws)
    (proof,) = (f for f in ws.forgotten("clicks").files() if f.name == "proof.txt")
    assert "NOT FINISHED" in proof.read_text()
    assert re.search(f"\n  LEFT: {unfinished}", proof.read_text())
    assert files_with(tmp_path / "cache", FORGOTTEN) == [str(upload.relative_to(tmp_path / "cache"))]
    copies.drop(upload)
    places, request = erase(ws)
    assert request.finished == NOW
    assert [p.left for p in places if p.kind == "cache"] == [""]
    # What comes after it is left, too, until it goes; what was made since then of rows without them stays.
    with ws.dataset("clicks", day(0), "anew").new_folder() as folder:
        (folder / "x").put_text("x")
    upload = copies.new_path("part-1.parquet")
    upload.write_text(FORGOTTEN[1])
    with pytest.raises(IncompleteError, match=rf"not all is erased yet: {upload.parent}"):
        erase(ws)
    assert "NOT FINISHED" in proof.read_text()
    copies.drop(upload)
    assert erase(ws)[1].finished == NOW
    assert ws.dataset("clicks", day(0), "anew").exists()
    assert copies.cached_files() == {}
    with held:
        assert held.read() == "of others"
    # What is read now has none of them.
    for file in (*ws.lake.files(), *ws.store.files()):
        file.local_path()
    assert files_with(tmp_path / "cache", FORGOTTEN) == []


def test_copies_that_come_back_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    ws = Workspace(tmp_path / "home", "s3://bucket/lake", "s3://bucket/store")
    landed = ws.landing("clicks") / day(0) / "a.jsonl"
    landed.put_text(FORGOTTEN[0])
    real = copies.remove_cached_files

    def remove_and_read() -> None:
        """Remove a landing file while another process of this host reads it."""
        real()
        landed.local_path()

    landed.local_path()
    with monkeypatch.context() as patch:
        patch.setattr(copies, "remove_cached_files", remove_and_read)
        with pytest.raises(UserError, match=r"not all is erased: .*/cache/files/.*/a\.jsonl"):
            erase(ws)
    assert erase(ws)[1].finished == NOW


def test_a_store_that_is_away_is_no_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    ws = Workspace(tmp_path / "home", "s3://bucket/lake", "s3://bucket/store")
    torn, complete = (ws.table("clicks", "events") / f"{name}.parquet" for name in ("torn", "whole"))
    torn.put_text("PAR1")
    with pytest.raises(UserError, match=r"torn\.parquet cannot be read: restore or remove it"):
        erase(ws)
    torn.remove()
    complete.put_bytes(text_table())
    real = calls.download

    def away(bucket: Any, key: str, file: Path) -> Any:
        if key.endswith(complete.name):
            raise StoreAway(f"{key}: the store is away")
        return real(bucket, key, file)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "download", away)
        with pytest.raises(StoreAway, match=rf"{complete.name}: the store is away$"):
            erase(ws)
    assert erase(ws)[1].finished == NOW


def text_table() -> bytes:
    """Return a Parquet file with none of the persons."""
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"page": ["a"]}), out)
    return out.getvalue().to_pybytes()


def test_values_that_somebody_brings_back_go_again(ws: Workspace) -> None:
    erase(ws)
    with ws.dataset("clicks", day(0), "anew").new_folder() as folder:
        (folder / "x").put_text("x")
    put_rows(ws.table("clicks", "events"), day(0), events(0), record(day(0), ROWS))
    _, request = erase(ws)
    assert request.finished == NOW
    assert files_with(ws.home, FORGOTTEN) == []
    assert not ws.dataset("clicks", day(0), "anew").exists()  # made of these rows


def test_the_proof_names_no_value_and_the_list_hides_them(ws: Workspace) -> None:
    _, request = erase(ws)
    folder = ws.forgotten("clicks") / request.id
    proof = json.loads((folder / "proof.json").read_text())
    (run,) = proof["runs"]
    assert (run["second_look"], run["search"]["found"]) == ([], [])
    assert run["search"]["parquet"] > 10
    assert {"kind": "vocabulary", "what": "lake/clicks/vocabulary", "rows": 3}.items() <= next(
        p for p in run["places"] if p["kind"] == "vocabulary"
    ).items()
    assert "0 have some" in (folder / "proof.txt").read_text()
    listed = ForgottenValues.load(ws.forgotten_values("clicks"))
    assert listed is not None
    assert listed.restricted_to(["item_id"]) is None
    mask = listed.mask("user_id", pa.array([*USERS, None]))
    assert [u for u, m in zip(USERS, mask, strict=False) if m] == FORGOTTEN
    assert not mask[-1]


def test_a_second_look_that_finds_some_is_no_success(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    (ws.store / "promotions" / "clicks.jsonl").put_text(FORGOTTEN[0])
    with pytest.raises(UserError, match=r"not all is erased: promotions/clicks\.jsonl"):
        erase(ws)
    assert "NOT FINISHED" in next(ws.home.glob("forgotten/clicks/*/proof.txt")).read_text()
    (ws.store / "promotions" / "clicks.jsonl").remove()
    assert erase(ws)[1].finished == NOW


def test_what_the_search_alone_finds_after_a_finished_request_is_no_success(ws: Workspace) -> None:
    erase(ws)
    (ws.store / "promotions" / "clicks.jsonl").put_text(FORGOTTEN[0])
    with pytest.raises(UserError, match=r"not all is erased: promotions/clicks\.jsonl") as raised:
        erase(ws)
    assert raised.value.exit_code == EXIT_USER_ERROR
    assert "NOT FINISHED" in next(ws.home.glob("forgotten/clicks/*/proof.txt")).read_text()


def test_a_search_at_work_is_for_a_later_run(ws: Workspace) -> None:
    samples = ws.search("clicks", day(0), "a")
    (samples / "x").put_text("x")
    with run_lock(ws, "clicks-search"), pytest.raises(IncompleteError, match="a search is at work"):
        erase(ws)
    assert samples.exists()
    assert erase(ws)[1].finished == NOW
    assert not samples.exists()


def test_folders_of_other_hosts_are_named(ws: Workspace) -> None:
    """Hosts that share no scratch folder keep their own copies; these do not keep the request from finishing."""
    named = "encoded/clicks, mapped/clicks and copies of the store's files on other hosts"
    for master, scratch, listed_folders in (
        ("local[2]", "auto", 0),
        ("local[2]", "own", 1),
        ("spark://head:7077", "auto", 1),
    ):
        spec = SPEC.model_copy(update={"spark": Spark(master=master, scratch=scratch)})  # type: ignore[arg-type]
        assert [p.name for p in found_places(spec, ws, PERSONS, NOW)].count(named) == listed_folders, master
    _, request = erase(ws, spec)
    assert request.finished == NOW
    text = next(ws.home.glob("forgotten/clicks/*/proof.txt")).read_text()
    assert f"cache      {named}: -; not reached: remove the first two below" in text


def test_a_graph_of_training_rows_stays_named_until_its_model_is_gone(ws: Workspace) -> None:
    folder = ws.model("clicks", day(0), f"train-{day(0)}") / "model"
    file = Path(folder / "dense.safetensors")
    graph = {"network.graph_users": torch.tensor([2 + USERS.index(FORGOTTEN[0])])}
    save_file({**load_file(file), **graph}, file)
    state = WorkspaceState(SPEC, ws, NOW)
    for can_erase in (True, False, False):
        (place,) = [p for p in model_places(state, PERSONS) if p.left]
        assert (place.name, place.act is not None) == (ws.name_of(folder), can_erase)
        if place.act is not None:
            place.act()
    # A graph without edges of theirs, as of a later training with the same codes.
    save_file({**load_file(file), "network.graph_users": torch.tensor([2 + USERS.index(USERS[3])])}, file)
    assert not [p for p in model_places(state, PERSONS) if p.left]


def test_at_work(ws: Workspace) -> None:
    with run_lock(ws, "clicks"), pytest.raises(BusyError):
        erase(ws)
    assert not ws.forgotten("clicks").exists()


def test_command(ws: Workspace, tmp_path: Path) -> None:
    (tmp_path / "values").write_text("5\n")
    words = ["forget", "clicks", "--column", "user_id", "--values", str(tmp_path / "values"), "--home", str(ws.home)]
    dry = CliRunner().invoke(app, [*words, "--set", "publish=null", "--json"])
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.output)["deleted"] is False
