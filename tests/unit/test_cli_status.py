"""`headrace status` and `headrace watch` over days in any state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.status import describe
from headrace.cli.summary import quality_lines
from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.jobs.observe import application as running
from headrace.jobs.observe.application import Observation, RunningFile, RunningStage
from headrace.logs import Progress, report_progress
from headrace.stage import run_lock, run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import Location
from tests.cli_support import DS, Fake, Yard, make_yard
from tests.support import CLICKS_STAGES


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


def states(output: str) -> dict[str, str]:
    """Return the rest of each stage's line, by stage."""
    states_by_stage = {}
    for line in output.splitlines():
        words = line.split()
        if words[:2] == ["clicks", DS]:
            states_by_stage[words[2]] = " ".join(words[3:])
    return states_by_stage


def test_status_tells_done_from_stale_and_missing(yard: Yard) -> None:
    yard.run("--to", "baseline")
    by_stage = states(yard("status").output)
    assert list(by_stage) == list(CLICKS_STAGES)
    assert by_stage["ingest"].startswith("done 1,234 kept ")
    assert by_stage["score"].startswith("missing")
    yard.fakes["ingest"].source = "v2"
    assert states(yard("status", "clicks").output)["ingest"].startswith("stale: its inputs or its part of the spec")
    yard.fakes["ingest"].source = "gone"
    assert states(yard("status", "clicks").output)["ingest"].startswith("stale: no landing files")
    yard.fakes["ingest"].source = "v1"
    changed = states(yard("status", "clicks", "--set", "train.epochs=9").output)
    assert changed["features"].startswith("done")
    assert changed["train"].startswith("stale")
    assert states(yard("status", "clicks", "--set", "baseline=null").output).keys() == set(CLICKS_STAGES) - {"baseline"}


def test_status_of_a_pipeline_whose_file_is_unknown_goes_by_the_manifests(yard: Yard, tmp_path: Path) -> None:
    yard.run("--to", "train")
    runs = yard.home / "runs"
    (runs / "clicks").rename(runs / "elsewhere")
    output = yard("status").output.replace("elsewhere", "clicks")
    assert states(output)["train"].startswith("done")
    # It has what every pipeline has, and what has run: not outcomes, experiments, ... of which nothing is known.
    assert list(states(output)) == ["ingest", "features", "drift", "train", "promote", "report"]
    path = runs / "elsewhere" / DS / "features.json"
    path.write_text(path.read_text().replace('"key": "', '"key": "0'))
    output = yard("status").output.replace("elsewhere", "clicks")
    assert states(output)["train"].startswith("stale: features has been run again")


def test_status_shows_the_newest_days_and_a_run_at_work(yard: Yard) -> None:
    for ds in ("2026-01-01", "2026-01-02", DS):
        assert yard("ingest", "clicks", "--ds", ds).exit_code == 0
    output = yard("status", "--last", "2").output
    assert "2026-01-01" not in output
    assert "2026-01-02" in output
    assert "at work" not in output
    assert "2026-01-01" in yard("status", "--last", "0").output
    for lock in (None, "train"):
        with run_lock(Workspace(yard.home), "clicks", lock):
            assert f"clicks: a stage is at work (process {os.getpid()} on " in yard("status").output


def test_lineage_prints_the_tree(yard: Yard) -> None:
    yard.run()
    result = yard("lineage", "lake/clicks/score", "--ds", DS)
    assert result.exit_code == 0
    assert result.output.index("lake/clicks/score") < result.output.index(f"features {DS}")
    leaves = [line.strip("│├└─ ").split()[0] for line in result.output.splitlines()]
    assert "landing/clicks/2026-01-03" in leaves


def test_quality_without_ceiling_or_with_ranking_metrics_only() -> None:
    def manifest(stage: str, metrics: Any) -> Manifest:
        return Manifest(stage=stage, pipeline="clicks", ds=DS, key="k", spec_hash="s", facts={"metrics": metrics})

    lines = quality_lines({"train": manifest("train", {"auc": 0.7, "hr_at_k": 0.71, "ndcg_at_k": 0.42})}, None)
    assert lines[-1] == "neural  0.7000  hr_at_k 0.7100, ndcg_at_k 0.4200"
    assert "–" in quality_lines({"train": manifest("train", {"auc": None, "hr_at_k": 0.5})}, 0.8)[2]
    assert quality_lines({"train": manifest("train", {"hr_at_10_full": 0.5})}, None) == [
        "",
        "ranking of the validation split",
        "neural  hr_at_10_full 0.5000",
    ]
    assert quality_lines({}, 0.8) == []
    assert quality_lines({"train": manifest("train", None)}, None) == []


def stage(start: float = 0.0, expected: float | None = None, p: Progress | None = None) -> RunningStage:
    return RunningStage("train", DS, "id", os.getpid(), start, start, expected, p)


def test_how_far_a_stage_is() -> None:
    assert describe(stage(), 75) == "train: at work for 1 min 15 s"
    assert describe(stage(expected=180), 5) == "train: at work for 5.0 s; the last time it took 3 min 00 s"
    line = describe(stage(expected=180, p=Progress(30, 120, "steps", 12.345, 7.29)), 2)
    assert line.endswith("[######..................] 30 of 120 steps (25 %), 12.3 steps a second, 7.3 s left")
    assert describe(stage(p=Progress(0, 4, "tasks of Spark")), 2).endswith("0 of 4 tasks of Spark (0 %)")


def test_a_stage_at_work_is_seen_from_another_process_until_it_ends(ws: Workspace) -> None:
    """Its stage writes its progress to the application's file while it works."""
    spec, observed_stages = load_spec("clicks"), []

    class Working(Fake):
        def run(self, ctx):  # type: ignore[no-untyped-def]
            report_progress(Progress(3, 10, "steps", 2.0, 3.5))
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                running = RunningStage.read(ws, "clicks")
                if running and running[0].progress:
                    observed_stages.append(running[0])
                    break
                time.sleep(0.05)
            return super().run(ctx)

    observation = Observation(spec, ws)
    for ds in ("2026-01-02", DS):
        with observation.stage("ingest", ds) as observed:
            observed.done(run_stage(Working("ingest"), spec, ws, ds, observed.begin).manifest)
        assert RunningStage.read(ws, "clicks") == []
    observation.close()
    first, second = observed_stages
    assert (first.stage, first.ds, first.pid) == ("ingest", "2026-01-02", os.getpid())
    assert first.progress == Progress(3, 10, "steps", 2.0, 3.5)
    assert (first.expected_seconds, second.expected_seconds is not None) == (None, True)
    assert first.run_id != second.run_id


def test_a_process_that_is_gone_is_at_nothing(ws: Workspace) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = RunningStage("train", DS, "id", int(done.stdout), 0.0, 0.0)
    dead.write(ws.running("clicks") / "train.json")
    (ws.running("clicks") / "features.json").put_text("{")
    assert RunningStage.read(ws, "clicks") == []


def test_without_a_terminal_only_news_are_said_and_ctrl_c_ends_it_well(yard: Yard) -> None:
    yard.run("--to", "features")
    ws = Workspace(yard.home)
    line = [sys.executable, "-m", "headrace.cli", "status", "clicks", "--ds", DS, "--home", str(yard.home)]
    lines: list[str] = []
    with subprocess.Popen([*line, "--watch", "--every", "0.1"], stdout=subprocess.PIPE, text=True) as watching:
        stdout = watching.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(stdout.readline, "")))
        reader.start()

        def wait_for(text: str) -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and watching.poll() is None:
                if any(text in line for line in lines):
                    return
                time.sleep(0.05)
            raise AssertionError(f"{text!r} is not in {lines}")

        wait_for("clicks 2026-01-03 promote: missing")
        with run_lock(ws, "clicks"), RunningFile(ws, "clicks", stage(time.time())):
            wait_for("train at work: train: at work for")
        watching.send_signal(signal.SIGINT)
        reader.join(30)
        assert watching.wait(30) == 0
    assert len([line for line in lines if "features: " in line]) == 1


def test_a_write_that_comes_late_leaves_no_file_of_a_stage_that_is_over(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held up in a write, as on a busy disk, for longer than the stage's end waits."""
    held, go_on, write = threading.Event(), threading.Event(), RunningStage.write

    def late(self: RunningStage, file: Location) -> None:
        if threading.current_thread().name == "running-stage":
            held.set()
            assert go_on.wait(30)
        write(self, file)

    monkeypatch.setattr(RunningStage, "write", late)
    monkeypatch.setattr(running, "_INTERVAL_SECONDS", 0.05)
    keeper = RunningFile(ws, "clicks", stage(time.time()))
    with keeper:
        assert held.wait(30)
        assert len(ws.running("clicks").entries()) == 1
    assert ws.running("clicks").entries() == []
    go_on.set()
    keeper._thread.join(30)
    assert ws.running("clicks").entries() == []
