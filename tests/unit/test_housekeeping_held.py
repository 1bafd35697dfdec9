"""Retention in drawn states of a home: what is dead and old goes, what a live process or a lease holds stays."""

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

from headrace.jobs.housekeeping.collect import collect
from headrace.stage import run_lock
from headrace.storage.flock import HeldFolder
from headrace.workspace import Workspace
from tests.housekeeping_support import clicks

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
    text = "import sys, time; from pathlib import Path; from headrace.storage.flock import HeldFolder\n"
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
