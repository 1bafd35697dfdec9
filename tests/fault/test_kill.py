"""A kill in each stage at a random moment, then the same command: the result equals an undisturbed run's."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.config.workspace import Workspace
from headrace.stage.manifest import Manifest
from tests.support import CLICKS_STAGES, DAY, NEXT_DAY, Run, assert_same, command, everything, headrace, manifests

#: How often a stage that got away is tried again.
_AIMS = 6
#: A stage that takes no longer may be over before it is hit.
_SHORT_SECONDS = 0.5
#: How often each stage is killed in lane `long`.
_TURNS = 4


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    try:
        yield home
    finally:
        headrace(home, "warehouse", "stop", settings={})


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, so that no part of it goes on behind our back."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=30)


def end_program(pid: int) -> None:
    """SIGTERM to the program that runs the stages, which `headrace run` has started."""
    for child in psutil.Process(pid).children():
        if any(word.endswith("run_stage.py") for word in child.cmdline()):
            child.terminate()


def run_and_kill(home: Path, stage: str, after: float, kill: Callable[[int], None]) -> bool:
    """Run what is left of the day, and kill it `after` seconds into a stage; whether the stage was still at work."""
    child = subprocess.Popen(
        command(home, "run", "clicks", "--ds", DAY), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout is not None
    try:
        lines = []
        for line in child.stdout:
            lines.append(line)
            if f"] {stage}: " in line:
                break
        else:
            pytest.fail(f"{stage} did not begin:\n{''.join(lines)}")
        time.sleep(after)
        kill(child.pid)
        child.stdout.read()
        child.wait(timeout=120)
        return not Workspace(home).manifest("clicks", DAY, stage).is_file()
    finally:
        kill_tree(child.pid)
        child.wait()
        child.stdout.close()


def kill_each_stage(undisturbed: Path, home: Path, points: random.Random, first_way: int) -> None:
    """Each run heals what the one before has left, and is killed in the stage after: all in shared applications."""
    assert headrace(home, "generate", "clicks", "--until", NEXT_DAY, "--no-spark").code == 0
    seconds = {stage: m.seconds for stage, m in manifests(undisturbed).items()}
    killed: dict[str, float] = {}
    for number, stage in enumerate(CLICKS_STAGES):
        moment = points.uniform(0.1, 0.9) * seconds[stage]
        # The machine's way, and the polite one, which leaves the stage its own end.
        kill = (kill_tree, end_program)[(number + first_way) % 2]
        for _ in range(_AIMS if seconds[stage] > _SHORT_SECONDS else 1):
            if run_and_kill(home, stage, moment, kill):
                killed[stage] = round(moment, 2)
                print(f"{stage} killed after {killed[stage]} s")
                break
            # It was faster than thought. Without its manifest it works again, over what it has left: that takes less.
            manifest = Workspace(home).manifest("clicks", DAY, stage)
            finished = Manifest.load(manifest)
            assert finished is not None
            moment = points.uniform(0.1, 0.6) * min(finished.seconds, moment)
            manifest.local_path().unlink()
    assert killed.keys() >= {s for s in CLICKS_STAGES if seconds[s] > _SHORT_SECONDS}, (
        "some stages ended before they were hit"
    )
    healed = headrace(home, "run", "clicks", "--ds", DAY)
    assert healed.code == 0, healed.output
    assert_same(everything(None, undisturbed), everything(None, home))


@pytest.mark.timeout(1800)
def test_killed_anywhere_then_rerun_equals_undisturbed(
    finished_day: tuple[Path, Run], home: Path, kill_points: random.Random
) -> None:
    """Each stage at one moment, by both ways in turn."""
    kill_each_stage(finished_day[0], home, kill_points, kill_points.randrange(2))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run_number", range(_TURNS))
def test_killed_at_many_moments(
    finished_day: tuple[Path, Run], home: Path, kill_points: random.Random, run_number: int
) -> None:
    """Each stage at other moments in each turn, and by both ways."""
    kill_each_stage(finished_day[0], home, kill_points, run_number % 2)
