"""Stages and their manifests: what is done, done again, or refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Spec, load_spec
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import BusyError, UserError
from headrace.stage import Context, Result, check_stage, identity, run_lock, run_stage
from headrace.stage.manifest import Input, Manifest, Output, fingerprint
from headrace.storage import local

DS = "2026-01-03"


@dataclass
class Fake:
    """A stage that writes one file whose content is its key; counts its work."""

    name: str = "features"
    version: int = 1
    needs: tuple[str, ...] = ()
    source: str = "v1"
    part: dict[str, Any] = field(default_factory=lambda: {"a": 1})
    fails: bool = False
    worked: list[Context] = field(default_factory=list)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        return self.part

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        return (Input(kind="landing", name="files", version=self.source),)

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        return None if (ctx.ws.home / manifest.output("file").name).is_file() else "the file is gone"

    def run(self, ctx: Context) -> Result:
        self.worked.append(ctx)
        if self.fails:
            raise UserError("no")
        path = ctx.ws.home / f"{self.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ctx.key)
        return Result(
            outputs=(Output(kind="file", name=path.name, version=ctx.key),),
            rows={"n": 3},
            facts={"f": 1},
            peak_memory_mib={"rank0": 5.0},
        )


@pytest.fixture
def spec() -> Spec:
    return load_spec("clicks")


def test_a_run_commits_a_manifest_and_a_second_one_does_nothing(ws: Workspace, spec: Spec) -> None:
    stage = Fake()
    first = run_stage(stage, spec, ws, DS)
    assert (first.skipped, first.reason) == (False, "not yet run for this date")
    saved = Manifest.load(ws.manifest("clicks", DS, "features"))
    assert saved == first.manifest
    assert saved is not None
    assert (saved.rows, saved.facts, saved.outputs[0].version) == ({"n": 3}, {"f": 1}, saved.key)
    assert saved.peak_memory_mib["rank0"] == 5.0
    assert saved.peak_memory_mib["python"] > 0
    assert saved.resources is not None
    assert saved.resources.core_seconds >= 0
    second_run = run_stage(stage, spec, ws, DS)
    assert second_run.skipped
    assert second_run.manifest == saved
    assert len(stage.worked) == 1


@pytest.mark.parametrize("change", [{"source": "v2"}, {"part": {"a": 2}}, {"version": 2}])
def test_changed_inputs_spec_or_code_run_again_under_another_key(
    ws: Workspace, spec: Spec, change: dict[str, Any]
) -> None:
    first = run_stage(Fake(), spec, ws, DS).manifest
    outcome = run_stage(Fake(**change), spec, ws, DS)
    assert (outcome.skipped, outcome.reason) == (False, "its inputs or its part of the spec have changed")
    assert outcome.manifest.key != first.key
    # Going back is the first key again, so what it made can be found again.
    assert run_stage(Fake(), spec, ws, DS).manifest.key == first.key


def test_days_and_pipelines_do_not_share_a_key(ws: Workspace, spec: Spec) -> None:
    other_spec = spec.model_copy(update={"pipeline": "other"})
    keys = {run_stage(Fake(), s, ws, ds).manifest.key for s in (spec, other_spec) for ds in (DS, "2026-01-04")}
    assert len(keys) == 4


def test_a_damaged_output_runs_again(ws: Workspace, spec: Spec) -> None:
    stage = Fake()
    run_stage(stage, spec, ws, DS)
    (ws.home / "features.txt").unlink()
    outcome = run_stage(stage, spec, ws, DS)
    assert (outcome.skipped, outcome.reason) == (False, "the file is gone")
    assert (ws.home / "features.txt").is_file()


def test_a_failed_run_leaves_the_old_manifest(ws: Workspace, spec: Spec) -> None:
    manifest = run_stage(Fake(), spec, ws, DS).manifest
    with pytest.raises(UserError, match="no"):
        run_stage(Fake(source="v2", fails=True), spec, ws, DS)
    assert Manifest.load(ws.manifest("clicks", DS, "features")) == manifest
    assert run_stage(Fake(), spec, ws, DS).skipped


def test_a_missing_upstream_stage_is_named_with_the_command_that_makes_it(ws: Workspace, spec: Spec) -> None:
    stage = Fake(name="train", needs=("features", "baseline?"))
    with pytest.raises(UserError) as e:
        run_stage(stage, spec, ws, DS)
    assert "stage 'train' of 'clicks' for 2026-01-03 needs stage 'features'" in str(e.value)
    assert "headrace run clicks --ds 2026-01-03 --from features --to train" in str(e.value)
    assert not stage.worked


def test_upstream_is_given_pinned_and_a_rerun_of_it_is_noticed(ws: Workspace, spec: Spec) -> None:
    upstream = run_stage(Fake(), spec, ws, DS).manifest
    stage = Fake(name="train", needs=("features", "baseline?"))
    first = run_stage(stage, spec, ws, DS).manifest
    assert dict(stage.worked[0].upstream) == {"features": upstream}
    assert Input(kind="stage", name="features", version=identity(upstream)) in first.inputs
    # The optional one appears: other inputs.
    run_stage(Fake(name="baseline"), spec, ws, DS)
    assert not run_stage(stage, spec, ws, DS).skipped
    assert run_stage(stage, spec, ws, DS).skipped
    run_stage(Fake(source="v2"), spec, ws, DS)
    assert not run_stage(stage, spec, ws, DS).skipped


def test_the_key_is_known_before_the_work(ws: Workspace, spec: Spec) -> None:
    stage = Fake()
    manifest = run_stage(stage, spec, ws, DS).manifest
    assert stage.worked[0].key == manifest.key
    assert len(manifest.key) == 16


def test_the_work_is_given_the_inputs_that_its_key_was_computed_from(ws: Workspace, spec: Spec) -> None:
    class Overtaken(Fake):
        def inputs(self, ctx: Context) -> tuple[Input, ...]:
            self.source += "+"
            return super().inputs(ctx)

    run_stage(Fake(), spec, ws, DS)
    stage = Overtaken(name="train", needs=("features",))
    manifest = run_stage(stage, spec, ws, DS).manifest
    assert stage.worked[0].inputs == manifest.inputs
    assert [(i.kind, i.version) for i in manifest.inputs if i.kind != "stage"] == [("landing", "v1+")]


def test_a_file_that_is_no_manifest_is_named(ws: Workspace, spec: Spec) -> None:
    path = ws.manifest("clicks", DS, "features").local_path()
    path.parent.mkdir(parents=True)
    path.write_text('{"stage": 1}')
    with pytest.raises(UserError, match=r"features\.json is not a manifest"):
        run_stage(Fake(), spec, ws, DS)


def test_check_looks_and_changes_nothing(ws: Workspace, spec: Spec) -> None:
    stage = Fake()
    assert check_stage(stage, spec, ws, DS) == "not yet run for this date"
    assert not stage.worked
    assert not ws.home.exists()
    run_stage(stage, spec, ws, DS)
    assert check_stage(stage, spec, ws, DS) is None
    (ws.home / "features.txt").unlink()
    assert check_stage(stage, spec, ws, DS) == "the file is gone"
    assert check_stage(stage, spec, ws, DS, verify=False) is None
    assert check_stage(Fake(source="v2"), spec, ws, DS, verify=False) is not None
    # It takes no lock: a look is possible while a run is at work.
    with run_lock(ws, "clicks"):
        assert check_stage(stage, spec, ws, DS) == "the file is gone"


HOLD = """
import sys, time
from pathlib import Path
from headrace.stage import run_lock
from headrace.config.workspace import Workspace
with run_lock(Workspace(Path(sys.argv[1])), "clicks"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_writer_a_pipeline_and_a_killed_one_frees_the_lock(ws: Workspace, spec: Spec) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(ws.home)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=rf"another run of pipeline 'clicks' is at work \(process {holder.pid} on "):
            run_stage(Fake(), spec, ws, DS)
        # Another pipeline is not in the way.
        run_stage(Fake(), spec.model_copy(update={"pipeline": "other"}), ws, DS)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    assert not run_stage(Fake(), spec, ws, DS).skipped


@dataclass
class Meets(Fake):
    """A stage that ends when another one is at work, too; `at_work` is called meanwhile."""

    door: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    at_work: Callable[[], None] = lambda: None

    def run(self, ctx: Context) -> Result:
        self.door.wait(60)
        self.at_work()
        self.door.wait(60)
        return Fake.run(self, ctx)


def test_stages_with_leases_of_their_own_run_at_the_same_time_and_no_other_beside_them(
    ws: Workspace, spec: Spec
) -> None:
    """`train` waits within its work until `baseline` is within its own; each tries to let others in."""
    refused: list[str] = []

    def run_other_stages() -> None:
        for name in ("features", "publish", "train", "baseline"):
            with pytest.raises(BusyError, match="another run of pipeline 'clicks' is at work"):
                run_stage(Fake(name), spec, ws, DS)
            refused.append(name)
        # What the other one is writing in the folder of manifests stays.
        assert unfinished.is_file()

    unfinished = Path(str(ws.manifest("clicks", DS, "baseline").parent / ".baseline.json.0123abcd.partial"))
    door = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        unfinished.parent.mkdir(parents=True)
        unfinished.write_text("{")
        stages = [Meets("train", door=door, at_work=run_other_stages), Meets("baseline", door=door)]
        outcomes = [f.result() for f in [pool.submit(run_stage, s, spec, ws, DS) for s in stages]]
    assert [o.skipped for o in outcomes] == [False, False]
    assert refused == ["features", "publish", "train", "baseline"]
    assert all(Manifest.load(ws.manifest("clicks", DS, name)) for name in ("train", "baseline"))
    # Alone, a stage clears away what killed ones have left.
    run_stage(Fake(), spec, ws, DS)
    assert not unfinished.exists()


@pytest.mark.parametrize("name", ["train", "baseline"])
def test_a_stage_with_a_lease_of_its_own_waits_for_one_that_runs_alone(ws: Workspace, spec: Spec, name: str) -> None:
    with run_lock(ws, "clicks"), pytest.raises(BusyError):
        run_stage(Fake(name), spec, ws, DS)
    assert not run_stage(Fake(name), spec, ws, DS).skipped


def test_the_manifest_of_a_run_survives_only_whole(ws: Workspace, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the manifest is written: the file under its name is the old one, and the rerun heals."""
    manifest = run_stage(Fake(), spec, ws, DS).manifest

    def cut(source: str | Path, target: str | Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            run_stage(Fake(source="v2"), spec, ws, DS)
    assert Manifest.load(ws.manifest("clicks", DS, "features")) == manifest
    assert not run_stage(Fake(source="v2"), spec, ws, DS).skipped


def _manifest() -> Manifest:
    schema = DatasetSchema(
        features=(
            Feature(name="y", kind=Kind.LABEL, dtype="float32"),
            Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", length=3, is_list=True, cardinality=9),
        )
    )
    return Manifest(
        stage="features",
        pipeline="p",
        ds="2026-01-01",
        key="k",
        spec_hash="s",
        inputs=(Input(kind="delta", name="lake/p/events", version="3"),),
        outputs=(Output(kind="dataset", name="d", version="k", rows=5),),
        rows={"train": 5},
        facts={"a": [1, {"b": None}]},
        dataset_schema=schema,
    )


def test_round_trip(tmp_path: Path) -> None:
    path = local(tmp_path / "m.json")
    _manifest().save(path)
    loaded = Manifest.load(path)
    assert loaded is not None
    assert loaded.model_dump(exclude={"started"}) == _manifest().model_dump(exclude={"started"})
    assert loaded.dataset_schema is not None
    assert loaded.dataset_schema.features[1].physical == ("tags__0", "tags__1", "tags__2")
    assert loaded.dataset_schema.label.name == "y"


def test_missing_is_none_and_damaged_is_refused(tmp_path: Path) -> None:
    assert Manifest.load(local(tmp_path / "none.json")) is None
    bad = tmp_path / "bad.json"
    bad.write_text('{"stage": "x"')
    with pytest.raises(UserError, match=r"bad\.json is not a manifest"):
        Manifest.load(local(bad))


def test_output_by_kind() -> None:
    assert _manifest().output("dataset").rows == 5
    with pytest.raises(KeyError, match="0 outputs of kind 'model'"):
        _manifest().output("model")


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5))
def test_fingerprint_ignores_order_and_sees_values(parts: dict[str, object]) -> None:
    shuffled = dict(reversed(list(parts.items())))
    assert fingerprint(parts) == fingerprint(shuffled)
    assert fingerprint({**parts, "zzzzzz": 1}) != fingerprint({**parts, "zzzzzz": 2})
