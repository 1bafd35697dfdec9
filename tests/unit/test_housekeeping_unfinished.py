"""Leftovers of killed writers in lake and store: found by age, removed under the lease, and by nobody else."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.config import Spec, load_spec
from headrace.errors import BusyError
from headrace.jobs.housekeeping.collect import collect
from headrace.jobs.housekeeping.folders import discard_unfinished
from headrace.jobs.housekeeping.workspace_state import CleanupStep, WorkspaceState
from headrace.manifest import Manifest, Output
from headrace.stage import run_lock
from headrace.storage import LeaseLost, Location
from headrace.storage.objects import copies
from headrace.workspace import Workspace
from tests.housekeeping_support import clicks
from tests.storage_homes import left_over, memory_home

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
    for stage in ("ingest", "score"):
        place = ws.handed_on("clicks", stage, local_scratch=True) / "run"
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
    ws, kinds = Workspace(tmp_path), ("ingest", "score", "tables", "vocabulary")
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
