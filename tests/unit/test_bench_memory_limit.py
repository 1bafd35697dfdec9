"""The bench's limit of memory: a process that does not end by itself is killed with its group."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bench.memory_limit import limited_memory


def test_a_group_goes_with_all_that_is_in_it() -> None:
    program = (
        "import subprocess, sys; input(); "
        "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    )
    try:
        with limited_memory(1) as group:
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            until = time.monotonic() + 30
            while len((group.folder / "cgroup.procs").read_text().split()) < 2 and time.monotonic() < until:
                time.sleep(0.02)
            assert group.peak_mib > 0
            assert group.killed == 0
            process.kill()
            process.wait()
    except RuntimeError as e:
        pytest.skip(str(e))
    assert not group.folder.exists()


def test_a_process_that_takes_more_is_killed() -> None:
    try:
        with limited_memory(0.05) as group:
            program = "input(); x = bytearray(2**28)"
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            group.add(process.pid)
            process.communicate(b"\n")
            assert process.returncode == -9
            assert group.killed == 1
    except RuntimeError as e:
        pytest.skip(str(e))
