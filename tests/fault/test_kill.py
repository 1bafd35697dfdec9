"""SIGKILL in each stage at a random moment, then the same command: the result equals an undisturbed run's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from headrace.stages import ORDER
from headrace.workspace import Workspace
from tests.support import DAY, NEXT_DAY, Run, assert_same, command, everything, headrace, manifests

#: What a stage's application takes besides its work, in seconds: only used to aim.
_START_SECONDS = 4.0
#: How often a stage that got away is tried again.
_AIMS = 4


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


def run_and_kill(home: Path, stage: str, after: float) -> bool:
    """Start a stage and kill it `after` seconds later; whether it was still at work."""
    words = ("run", "clicks", "--ds", DAY, "--from", stage, "--to", stage)
    with open(os.devnull, "wb") as nowhere:
        child = subprocess.Popen(command(home, *words), stdout=nowhere, stderr=nowhere)
    try:
        child.wait(timeout=after)
    except subprocess.TimeoutExpired:
        kill_tree(child.pid)
        child.wait(timeout=30)
        return True
    return False


@pytest.mark.timeout(1800)
def test_killed_anywhere_then_rerun_equals_undisturbed(
    spark: SparkSession, finished_day: tuple[Path, Run], home: Path
) -> None:
    undisturbed, _ = finished_day
    assert headrace(home, "generate", "clicks", "--until", NEXT_DAY).code == 0
    seconds = {stage: m.seconds for stage, m in manifests(undisturbed).items()}
    killed: dict[str, float] = {}
    for stage in ORDER:
        moment = random.uniform(0.1, 0.9) * (_START_SECONDS + seconds[stage])
        for _ in range(_AIMS):
            started = time.monotonic()
            if run_and_kill(home, stage, moment):
                killed[stage] = round(time.monotonic() - started, 2)
                break
            # It was faster than thought. Without its manifest it works again, over what it has left.
            Workspace(home).manifest("clicks", DAY, stage).local_path().unlink()
            moment /= 2
        healed = headrace(home, "run", "clicks", "--ds", DAY, "--from", stage, "--to", stage)
        assert healed.code == 0, f"{stage} killed after {moment:.1f} s does not heal:\n{healed.output}"
    print(f"killed after seconds: {killed}")
    assert list(killed) == list(ORDER), "some stages ended before they were hit"
    assert_same(everything(spark, undisturbed), everything(spark, home))
