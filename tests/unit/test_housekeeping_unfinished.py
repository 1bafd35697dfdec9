"""Removal in drawn states of a home: leftovers of killed writers go, what is held stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import BusyError
from headrace.jobs.housekeeping.collect import collect
from headrace.jobs.housekeeping.folders import discard_unfinished
from headrace.jobs.housekeeping.workspace_state import CleanupStep, WorkspaceState
from headrace.stage import run_lock
from headrace.stage.manifest import Manifest, Output
from headrace.storage import LeaseLost, Location
from headrace.storage.lease import HeldFolder
from headrace.storage.objects import copies
from tests.storage_support import clicks, left_over, memory_home

DS = "2026-01-03"


@pytest.fixture(params=["local", "objects"])
def ws(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    if request.param == "local":
        return Workspace(tmp_path)
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    return Workspace(tmp_path, "s3://bucket/lake", "s3://bucket/store")


@pytest.fixture
def spec() -> Spec:
    return clicks()


def unfinished(spec: Spec, ws: Workspace, now: datetime, delete: bool = False) -> dict[str, int]:
    """Bytes by what can go."""
    steps: list[CleanupStep] = [s for s in collect(spec, ws, now, delete) if "killed" in s.reason]
    return {s.name: s.size for s in steps}


def test_what_tasks_handed_on_in_the_lake_goes(ws: Workspace, spec: Spec) -> None:
    names = set()
    for stage in ("ingest", "prepared", "score"):
        place = ws.exchange_folder("clicks", stage, local_scratch=True) / "run"
        (place / "rows.parquet").put_text("x")
        begin(place / "items", "t", "x")
        names.add(f"staging/clicks/{stage}")
    (ws.staging("other") / "score" / "run" / "rows.parquet").put_text("x")
    now = datetime.now(UTC) + timedelta(seconds=1)
    steps = [s.name for s in collect(spec, ws, now, True) if s.name.startswith("staging/")]
    assert set(steps) == names
    assert [f.below(ws.lake) for f in (ws.lake / "staging").files()] == ["staging/other/score/run/rows.parquet"]
    assert left_over(ws.lake) == []


def test_what_stages_have_in_scratch_goes(tmp_path: Path, spec: Spec) -> None:
    ws, kinds = Workspace(tmp_path), ("ingest", "prepared", "score", "tables", "vocabulary")
    for kind in kinds:
        for pipeline in ("clicks", "other"):
            (ws.spark_local / kind / pipeline / "x" / "rows.arrow").put_text("x")
    steps = [s.name for s in collect(spec, ws, datetime.now(UTC) + timedelta(seconds=1), True)]
    assert sorted(steps) == [f"spark/{kind}/clicks" for kind in kinds]
    assert [f.below(ws.spark_local) for f in ws.spark_local.files()] == [f"{k}/other/x/rows.arrow" for k in kinds]


def begin(place: Location, token: str, text: str) -> None:
    (place.begin(token) / "deep" / "f").put_text(text)


def test_what_is_old_goes_and_what_is_young_or_published_stays(ws: Workspace, spec: Spec) -> None:
    dataset, model, other_model = (
        ws.dataset("clicks", DS, "k1"),
        ws.model("clicks", DS, "k2"),
        ws.model("other", DS, "k3"),
    )
    with dataset.new_folder() as folder:
        (folder / "f").put_text("published")
    output = Output(kind="dataset", name=ws.name_of(dataset), version="k1")
    named = Manifest(stage="features", pipeline="clicks", ds=DS, key="k1", spec_hash="s", outputs=(output,))
    named.save(ws.manifest("clicks", DS, "features"))
    for place in (dataset, model, other_model):
        begin(place, "t1", "12345")
    begun = 32 if ws.store.scheme == "s3" else 0  # what says that the attempt goes on
    time.sleep(0.02)
    now = datetime.now(UTC)
    time.sleep(0.02)
    young = model.begin("t2", alone=False)
    (young / "f").put_text("1")
    names = left_over(ws.store)
    sizes = {f"{p.below(ws.store)}": 5 + begun for p in (dataset, model)}
    assert unfinished(spec, ws, now) == sizes
    assert left_over(ws.store) == names
    assert (dataset / "f").read_text() == "published"
    assert unfinished(spec, ws, now, delete=True) == sizes
    assert unfinished(spec, ws, now, delete=True) == {}
    # Who was paused meanwhile cannot publish a part.
    with pytest.raises((LeaseLost, FileNotFoundError)):
        dataset.commit("t1")
    assert {f.below(dataset): f.read_text() for f in dataset.files()} == {"f": "published"}
    # Who is at work can; another pipeline's is none of this one's.
    model.commit("t2")
    other_model.commit("t1")
    assert [f.below(ws.store) for f in ws.store.files() if "models" in str(f)] == [
        f"models/clicks/{DS}/k2/f",
        f"models/other/{DS}/k3/deep/f",
    ]


def test_before_persons_are_erased_all_of_the_pipeline_goes(ws: Workspace) -> None:
    spec = load_spec("clicks", [])
    assert spec.publish is not None
    pipeline_places = [
        ws.staging("clicks") / "score" / "run" / "items",
        ws.forgotten("clicks") / "request" / "places.jsonl",
        ws.lake / "warehouse" / "clicks_scores" / f"ds={DS}" / "part-0.parquet",
        ws.table("clicks", "events") / "_delta_log" / "00000000000000000001.json",
    ]
    unlocked = [ws.landing("clicks") / DS, ws.promotions("clicks-baseline"), ws.stopped_arm("clicks", "order", "b")]
    places = [*pipeline_places, *unlocked, ws.promotions("other")]
    for place in places:
        begin(place, "t", "x")
    time.sleep(0.02)
    for days, left in ((0, places[-4:]), (spec.housekeeping.unfinished_days, places[-1:])):
        discard_unfinished(WorkspaceState(spec, ws, datetime.now(UTC) + timedelta(days=days)))
        folders = {place.parent for place in places}
        assert sorted(u.path for folder in folders for u in folder.unfinished()) == sorted(p.path for p in left)


def test_nothing_goes_while_a_holder_of_the_lease_is_at_work(ws: Workspace, spec: Spec) -> None:
    model, search = ws.model("clicks", DS, "k"), ws.search("clicks", DS, "k")
    for place in (model, search):
        begin(place, "t", "1")
    names = {p.below(ws.store) for p in (model, search)}
    time.sleep(0.02)
    now = datetime.now(UTC)
    left_before = left_over(ws.store)
    with run_lock(ws, "clicks", "train"):
        with pytest.raises(BusyError):
            unfinished(spec, ws, now, delete=True)
        assert {*unfinished(spec, ws, now)} == names
    # Searches have a lease of their own.
    with run_lock(ws, "clicks-search"):
        assert {*unfinished(spec, ws, now, delete=True)} == {model.below(ws.store)}
    assert [n for n in left_before if n.startswith("search")] == [
        n for n in left_over(ws.store) if n.startswith("search")
    ]
    assert {*unfinished(spec, ws, now, delete=True)} == {search.below(ws.store)}
    assert left_over(ws.store) == []


def test_uploads_of_this_host_that_nobody_goes_on_with(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_home(monkeypatch, tmp_path / "cache", readers=("s3",))
    ws = Workspace(tmp_path, "s3://bucket/lake", "s3://bucket/store")
    old, young = copies.new_path("a"), copies.new_path("b")
    for path in (old, young):
        path.write_bytes(b"123")
    ago = time.time() - 90_000
    os.utime(old, (ago, ago))
    os.utime(old.parent, (ago, ago))
    now = datetime.now(UTC)
    assert unfinished(spec, ws, now) == {"1 uploads of this host": 3}
    assert old.exists()
    unfinished(spec, ws, now, delete=True)
    assert not old.exists()
    assert young.exists()


NOW = datetime.now(UTC)
DAYS = 7
OLD, YOUNG = DAYS + 1, DAYS - 1
PIPELINES = ("clicks", "shop")

FOLDERS = st.lists(
    st.fixed_dictionaries(
        {
            # Of Spark's, which process it is of; of an older release, or of a program of the user's, nobody knows.
            "process": st.sampled_from(["alive", "dead", "unknown"]),
            "is_old": st.booleans(),
            "files": st.sampled_from([(), ("x",), ("deep/x", ".unfinished")]),
            # A file may be written in a folder that was made long ago, and one be removed that was old.
            "young_file": st.booleans(),
        }
    ),
    max_size=5,
)
STAGES = st.lists(
    st.tuples(st.sampled_from(["ingest", "vocabulary"]), st.sampled_from(PIPELINES), st.booleans()), max_size=3
)
#: (the pipeline or its search, whether a stage of it has finished once) at work.
AT_WORK = st.lists(st.tuples(st.sampled_from(["shop", "shop-search", "clicks-search"]), st.booleans()), max_size=2)


def age(path: Path, days: float) -> None:
    seconds = (NOW - timedelta(days=days)).timestamp()
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            os.utime(Path(folder, name), (seconds, seconds))
        os.utime(folder, (seconds, seconds))


def fill(folder: Path, state: dict[str, Any]) -> bool:
    """Fill a folder and return whether it is old afterwards."""
    for name in state["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    age(folder, OLD if state["is_old"] else YOUNG)
    if state["young_file"] and state["files"]:
        seconds = (NOW - timedelta(days=YOUNG)).timestamp()
        os.utime(folder / state["files"][-1], (seconds, seconds))
        return False
    return bool(state["is_old"])


@settings(max_examples=60, deadline=None)
@given(FOLDERS, STAGES, AT_WORK)
def test_states_of_a_home(
    tmp_path_factory: pytest.TempPathFactory,
    folders: list[dict[str, Any]],
    stages: list[tuple[str, str, bool]],
    at_work: list[tuple[str, bool]],
) -> None:
    ws = Workspace(tmp_path_factory.mktemp("home"))
    local = (ws.spark_local / "local").local_path()
    local.mkdir(parents=True)
    stay, go, held = set[Path](), set[Path](), list[HeldFolder]()
    with ExitStack() as stack:
        for name, has_run in dict(at_work).items():
            if has_run:
                (ws.runs(name) / "2026-01-03" / "note").put_text("x")
            stack.enter_context(run_lock(ws, name))
        for n, state in enumerate(folders):
            if state["process"] == "unknown":
                path = local / f"blockmgr-{n}"
                path.mkdir()
                is_held = bool(at_work)
            else:
                folder = HeldFolder(local)
                path, is_held = folder.path, state["process"] == "alive"
                if is_held:
                    held.append(folder)
                else:
                    os.close(folder._fd)  # as the kernel does it at a process's end
            (go if fill(path, state) and not is_held else stay).add(path)
        for kind, pipeline, is_old in stages:
            path = (ws.spark_local / kind / pipeline).local_path()
            path.mkdir(parents=True, exist_ok=True)
            age(path, OLD if is_old else YOUNG)
            (go if is_old and pipeline == "clicks" else stay).add(path)
            (stay if is_old and pipeline == "clicks" else go).discard(path)
        listed = list(collect(clicks(unfinished_days=DAYS), ws, NOW, delete=False))
        assert {ws.home / step.name for step in listed if step.name.startswith("spark/")} == go
        steps = list(collect(clicks(unfinished_days=DAYS), ws, NOW, delete=True))
        assert {ws.home / step.name for step in steps if step.name.startswith("spark/")} == go
        assert {path for path in stay | go if path.exists()} == stay
        for folder in held:
            os.close(folder._fd)


def test_the_folder_of_a_live_process_and_of_one_that_was_killed(tmp_path: Path) -> None:
    """Another process holds the folder and writes nothing into it; gc's clock is then set days ahead."""
    ws = Workspace(tmp_path)
    parent = (ws.spark_local / "local").local_path()
    text = "import sys, time; from pathlib import Path; from headrace.storage.lease import HeldFolder\n"
    text += "print(HeldFolder(Path(sys.argv[1])).path.name, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", text, str(parent)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        later = datetime.now(UTC) + timedelta(days=DAYS + 1)
        assert [s.name for s in collect(clicks(unfinished_days=DAYS), ws, later, delete=True)] == []
        assert (parent / name).is_dir()
        process.kill()
    time.sleep(0.01)
    removed = {s.name for s in collect(clicks(unfinished_days=DAYS), ws, later, delete=True)}
    assert removed == {f"spark/local/{name}", f"spark/local/{name}.lock"}
    assert list(parent.iterdir()) == []


def test_a_folder_that_is_released_leaves_nothing(tmp_path: Path) -> None:
    folder = HeldFolder(tmp_path / "local")
    (folder.path / "x").write_text("x")
    assert HeldFolder.is_held(folder.path)
    folder.release()
    assert list((tmp_path / "local").iterdir()) == []
