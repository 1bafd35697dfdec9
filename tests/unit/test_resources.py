"""Resources that a stretch has used, compared with what getrusage and the processes themselves say."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.stage.manifest import Manifest, Resources
from headrace.stage.resources import REMOTE, ResourceUse, Spent

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel's files are Linux's")

WORK = "import time\nwhile time.process_time() < {seconds}: sum(range(10_000))"
WRITE = """
import os, pathlib, sys
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom(1 << 20) * 4)
    os.fsync(file.fileno())
io = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
print(io["write_bytes"])
"""


def rusage_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in usages)


def test_processor_time_is_that_of_this_process_and_its_children_that_have_ended() -> None:
    use, start = ResourceUse.begin(), rusage_seconds()
    subprocess.run([sys.executable, "-c", WORK.format(seconds=0.4)], check=True)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        sum(range(10_000))
    used, expected = use.used(), rusage_seconds() - start
    assert used is not None
    assert expected > 0.6
    assert used.core_seconds == pytest.approx(expected, abs=0.1)


def test_a_child_at_work_counts_before_it_ends() -> None:
    code = WORK.format(seconds=0.3) + "\nprint(flush=True)\nimport sys; sys.stdin.read()"
    use = ResourceUse.begin()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = use.used()
        assert used is not None
        assert used.core_seconds + 0.02 >= 0.3
        child.communicate()


def test_what_ended_children_wrote_counts(tmp_path: Path) -> None:
    use = ResourceUse.begin()
    completed = subprocess.run([sys.executable, "-c", WRITE, str(tmp_path / "f")], check=True, capture_output=True)
    used = use.used()
    assert used is not None
    assert used.written_bytes >= int(completed.stdout)


def test_what_is_used_elsewhere_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([Spent(5.0, 100, 10), Spent(905.0, 350, 30)])
    monkeypatch.setattr("headrace.stage.resources.REMOTE", [*REMOTE, lambda: next(spent)])
    used = ResourceUse.begin().used()
    assert used is not None
    assert 900 <= used.core_seconds < 901
    assert (used.read_bytes >= 250, used.written_bytes >= 20) == (True, True)


def test_what_cannot_be_told_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended_source() -> Spent:
        raise ConnectionRefusedError("the JVM has ended")

    monkeypatch.setattr("headrace.stage.resources.REMOTE", [ended_source, lambda: Spent(3.0)])
    used = ResourceUse.begin().used()
    assert used is not None
    assert used.core_seconds < 1


def test_what_ranks_tell_is_added_where_nobody_has_waited_for_them() -> None:
    used = ResourceUse.begin().used(ranks=500.0)
    assert used is not None
    assert 500 <= used.core_seconds < 501
    use = ResourceUse.begin()
    subprocess.run([sys.executable, "-c", WORK.format(seconds=0.3)], check=True)
    without_ranks, with_ranks = use.used(), use.used(ranks=0.2)
    assert without_ranks is not None
    assert with_ranks is not None
    assert with_ranks.core_seconds == pytest.approx(without_ranks.core_seconds, abs=0.1)


def test_manifests_from_before_it_was_measured_are_read_and_written_as_they_were() -> None:
    old = Manifest(stage="train", pipeline="clicks", ds="2026-01-01", key="k", spec_hash="s")
    assert "resources" not in old.model_dump()
    new = old.model_copy(update={"resources": Resources(core_seconds=1.5, read_bytes=2, written_bytes=3)})
    assert Manifest.model_validate_json(new.model_dump_json()) == new
