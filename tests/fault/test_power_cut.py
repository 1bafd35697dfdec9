"""A power cut at any moment of a day: nothing that was done is lost, and the same command heals the rest.

The whole campaign is `scripts/power_cut.py`; this is a part of it, at moments drawn anew for each run of the tests.
Lane `all` checks all states, and runs two of them again by the command line; lane `long` runs many again, in forks of
one process with Spark.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.installation import checkout
from tests.fault.power_cuts import Cut, RecordedDays, damages, rerun
from tests.fault.recorded_disk import LIBRARY, Survival

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the recorder stands before Linux's C library"),
    pytest.mark.slow,
    pytest.mark.service,
    pytest.mark.jvm,
    pytest.mark.timeout(1800),
]

#: Moments that are drawn, besides two after each stage. Their homes are checked without running a stage.
CHECKED = 60
#: Minutes of lane `long` for days that are run again.
MINUTES = 20


@pytest.fixture(scope="module")
def seed() -> int:
    value = int(os.environ.get("HEADRACE_TEST_SEED") or random.SystemRandom().randrange(10**9))
    print(f"HEADRACE_TEST_SEED={value}")
    return value


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("power")


@pytest.fixture(scope="module")
def recorded(work: Path) -> RecordedDays:
    """A day and every change that it made; fails where the recording misses one."""
    assert LIBRARY.is_file(), f"{LIBRARY} is not built: make native"
    return RecordedDays.record(work / "recorded-1")


def test_what_is_done_is_on_the_disk(recorded: RecordedDays, work: Path, seed: int) -> None:
    ran = campaign(work, seed, 0)
    cuts = recorded.after_stages(seed) + recorded.draw(CHECKED, seed)
    assert f"{len(cuts)} cuts" in ran
    assert f"checked: {len(set(recorded.states(cuts).values()))} states, 0 with harm" in ran


@pytest.mark.long
@pytest.mark.timeout(3 * 60 * MINUTES)
@pytest.mark.usefixtures("recorded")
def test_reruns_give_the_undisturbed_day(work: Path, seed: int) -> None:
    ran = campaign(work, seed, MINUTES)
    states = re.search(r"rerun: (\d+) states, 0 with harm", ran)
    assert states is not None, ran[-5000:]
    assert int(states[1]) > 0
    assert re.search(r"command: [1-9]\d* states, 0 with harm", ran)


def test_the_rerun_after_a_random_stage_gives_what_it_had_made(recorded: RecordedDays, seed: int) -> None:
    heal_after(recorded, seed, random.Random(seed).choice(recorded.stages))


def test_the_rerun_after_a_random_moment_gives_the_undisturbed_day(recorded: RecordedDays, seed: int) -> None:
    heal(recorded, recorded.draw(1, seed + 1)[0], None)


def test_lost_bytes_would_show(recorded: RecordedDays) -> None:
    """The check itself: a data file of events is emptied, as it was before data were synced."""
    cut = Cut(recorded.ends[recorded.days[0], "ingest"], recorded.days[0], "ingest", "end", Survival.ALL, 0)
    disk = recorded.disk()
    recorded.rebuild(cut, disk, warehouse=False)
    assert damages(recorded, cut, disk) == []
    next((recorded.home / "lake" / "clicks" / "events").rglob("part-*.parquet")).write_bytes(b"")
    assert damages(recorded, cut, disk) != []


def campaign(work: Path, seed: int, minutes: int) -> str:
    """Run the campaign's program, which forks: this process has threads. Returns what it printed."""
    words = ["--nine", "--cuts", CHECKED, "--seed", seed, "--minutes", minutes, "--work", work]
    line = [sys.executable, "-m", "scripts.power_cut", "recorded", *map(str, words)]
    ran = subprocess.run(line, cwd=checkout(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    return ran.stdout


def heal_after(recorded: RecordedDays, seed: int, stage: str) -> None:
    """A home right after a stage; what was not synced, and what was, is the same there: `test_what_is_done...`."""
    cuts = recorded.after_stages(seed, [Survival.NAMES])
    heal(recorded, next(cut for cut in cuts if cut.stage == stage), stage)


def heal(recorded: RecordedDays, cut: Cut, last: str | None) -> None:
    print(cut)
    recorded.rebuild(cut, recorded.disk())
    assert rerun(recorded, last) is None
