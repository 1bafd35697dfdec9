"""Peaks of memory are those of a stretch, in processes that live longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.installation import checkout
from headrace.stage.resources import PeakMemory

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's files are Linux's")

#: MiB that no test's own needs come near.
LARGE = 300
CHILD = f"import sys; b'x' * ({LARGE} << 20); print('made', flush=True); sys.stdin.read()"


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_what_was_needed_before_does_not_count() -> None:
    # In a process of its own: this one's tests may have freed as much, and kept it. By one that needed more, whose
    # peak getrusage hands to the processes that it starts.
    code = f"""
import subprocess, sys
b"x" * ({2 * LARGE} << 20)
subprocess.run([sys.executable, "-c", "import tests.unit.test_memory as t; t.need_it_twice()"], check=True)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=checkout())


def need_it_twice() -> None:
    baseline = resident_mib()
    b"x" * (LARGE << 20)
    peak = PeakMemory.begin()
    assert peak.mib()["python"] < baseline + LARGE / 2
    held = b"x" * (LARGE << 20)
    del held
    assert peak.mib()["python"] > baseline + 0.9 * LARGE


def test_ended_children_count_where_they_are_the_largest() -> None:
    # In a process of its own: this one's tests may have had children that were larger.
    code = "import tests.unit.test_memory as t; t.end_children()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=checkout())


def end_children() -> None:
    subprocess.run([sys.executable, "-c", CHILD], input=b"", check=True, stdout=subprocess.DEVNULL)
    peak = PeakMemory.begin()
    subprocess.run(["true"], check=True)
    assert "children" not in peak.mib()
    larger = CHILD.replace(str(LARGE), str(2 * LARGE))
    subprocess.run([sys.executable, "-c", larger], input=b"", check=True, stdout=subprocess.DEVNULL)
    assert peak.mib()["children"] > 1.9 * LARGE


def test_a_child_that_lives_on_begins_anew() -> None:
    """Spark's Python workers live on from stage to stage like this; the reference is the kernel's own figure."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        status = Path(f"/proc/{child.pid}/status")

        def high_water_mib() -> float:
            return next(int(x.split()[1]) / 1024 for x in status.read_text().splitlines() if x.startswith("VmHWM"))

        assert high_water_mib() > 0.9 * LARGE
        PeakMemory.begin()
        assert high_water_mib() < LARGE / 2
        child.communicate()
