"""The lanes of tests: each test is in one, and a lane runs what it selects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.installation import checkout
from tests.lanes import (
    DRAWN,
    DRAWN_PARTS,
    FIXTURES,
    FOLDERS,
    LANES,
    PASSED,
    QUICK_JVM,
    SEED,
    SLOW,
    VARIABLE,
    markers_of,
    part_of,
    scale_examples,
)


def lanes_of(markers: set[str]) -> set[str]:
    return {
        name
        for name, lane in LANES.items()
        if Expression.compile(lane.expression).evaluate(lambda marker, **_: marker in markers)
    }


def test_whatever_markers_a_test_has_it_is_in_a_lane(pytestconfig: pytest.Config) -> None:
    names = [re.match(r"\w+", line)[0] for line in pytestconfig.getini("markers")]  # type: ignore[index]
    own_markers = ["jvm", "service", "slow", "rack", "long", "extra", "drawn"]
    assert set(own_markers) <= set(names)
    for markers in map(
        set, chain.from_iterable(combinations([*own_markers, "hypothesis"], n) for n in range(len(own_markers) + 2))
    ):
        lanes = lanes_of(markers)
        assert lanes, markers
        assert "quick" not in lanes or "all" in lanes
        assert ("all" in lanes) == ("long" not in markers)
    assert lanes_of(set()) == {"quick", "all"}
    assert lanes_of({"hypothesis", "slow"}) == {"all", "long"}
    assert lanes_of({"drawn", "slow"}) == {"all", "long"}


def test_each_lane_has_its_target() -> None:
    makefile = (checkout() / "Makefile").read_text()
    assert set(re.findall(rf"{VARIABLE}=(\w+)", makefile)) == set(LANES)
    assert "make test-all" in (checkout() / ".ci" / "run").read_text()


def test_what_the_tables_name_is_here() -> None:
    assert [f for f in FOLDERS if not any((checkout() / f).glob("test_*.py"))] == []
    for prefix in [*QUICK_JVM, *SLOW, *DRAWN]:
        file, _, function = prefix.partition("::")
        if not function:
            assert any(checkout().glob(f"{prefix}*" if prefix.endswith(".py") else f"{prefix}*.py")), prefix
            continue
        assert f"\ndef {function.partition('[')[0]}(" in (checkout() / file).read_text()
    conftest = (checkout() / "conftest.py").read_text()
    assert [name for name in FIXTURES if f"def {name}(" not in conftest] == []


def test_who_uses_spark_is_slow_unless_it_is_named() -> None:
    quick = next(iter(QUICK_JVM))
    assert markers_of(quick, ["spark"], []) == {"jvm"}
    assert markers_of("tests/unit/test_any.py", ["spark"], []) == {"jvm", "slow"}
    assert markers_of("tests/unit/test_any.py", [], ["jvm"]) == {"slow"}
    assert markers_of("tests/unit/test_any.py", ["tmp_path"], []) == set()
    assert markers_of("tests/rack/test_any.py", [], []) == {"jvm", "rack", "extra", "slow"}


def test_what_is_drawn_is_slow_and_each_part_has_some() -> None:
    assert all("slow" in markers_of(f"{prefix}::test_any", ["spark"], []) for prefix in DRAWN)
    assert {part_of(prefix) for prefix in DRAWN} == set(range(DRAWN_PARTS))
    assert part_of("tests/unit/test_lanes.py::test_what_is_drawn") is None
    assert not [prefix for prefix in QUICK_JVM if part_of(prefix) is not None]


@pytest.mark.parametrize(
    ("examples", "factor", "expected"), [(40, 0.3, 12), (10, 0.3, 5), (3, 0.3, 3), (20, 1, 20), (6, 40, 240)]
)
def test_a_lane_scales_a_property_test_s_own_examples(examples: int, factor: float, expected: int) -> None:
    seen: list[int] = []

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.integers())
    def property_test(n: int) -> None:
        seen.append(n)

    scale_examples(property_test, factor)
    property_test()
    assert len(seen) == expected


_TESTS = """
import pytest
from hypothesis import given, settings, strategies as st

seen = []

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.parametrize("name", ["a", "b"])
@settings(max_examples=20, deadline=None)
@given(n=st.integers())
def test_property(name, n):
    seen.append(name)

def test_examples():
    print("examples", seen.count("a"), seen.count("b"))

def test_lacks_a_jar(): pytest.skip("the jar is not here: run `make iceberg`")

def test_lacks_a_gpu(): pytest.skip("no GPU")
"""


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        ("", {"passed": 6, "skipped": 2, "examples": 20}),
        ("quick", {"passed": 4, "skipped": 1, "failed": 1, "deselected": 2, "examples": 6}),
        ("all", {"passed": 5, "skipped": 1, "failed": 1, "deselected": 1, "examples": 6}),
        ("long", {"passed": 3, "deselected": 5}),
    ],
)
def test_a_run_of_a_lane(lane: str, expected: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "conftest.py").write_text(
        "import os\nfrom tests.lanes import LanePlugin\n"
        f"def pytest_configure(config): config.pluginmanager.register(LanePlugin({lane!r}))\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    long\n    jvm\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(checkout())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|failed|deselected)", ran.stdout)}
    if examples := re.search(r"examples (\d+) \1", ran.stdout):
        counted["examples"] = int(examples[1])
    assert counted == expected, ran.stdout + ran.stderr
    assert ("mark the test `extra`" in ran.stdout) == (lane in ("quick", "all"))


def test_seeds_one_after_the_other_take_each_drawn_test_once(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(7))\ndef test_drawn(n): pass\ndef test_each_run(): pass\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests import lanes\nlanes.DRAWN = tuple(f'test_some.py::test_drawn[{n}' for n in range(7))\n"
        "def pytest_configure(config): config.pluginmanager.register(lanes.LanePlugin('all'))\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    drawn\n    slow\n    long\n")
    taken: list[str] = []
    for seed in range(100, 100 + DRAWN_PARTS):
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", "."],
            env=os.environ | {"PYTHONPATH": str(checkout()), SEED: str(seed)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        tests = re.findall(r"test_some.py::(\S+)", ran.stdout)
        assert "test_each_run" in tests, ran.stdout + ran.stderr
        taken += [test for test in tests if test != "test_each_run"]
    assert sorted(taken) == [f"test_drawn[{n}]" for n in range(7)]


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_goes_on_where_another_stopped(processes: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n\n"
        "def test_passes(): pass\n\n"
        "def test_is_mended(): assert 'MENDED' in os.environ\n\n"
        "@pytest.fixture\ndef leaves(): yield; assert 'MENDED' in os.environ\n\n"
        "def test_ends_badly(leaves): pass\n\n"
        "def test_skips(): pytest.skip('no GPU')\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests.lanes import LanePlugin\n"
        "def pytest_configure(config): config.pluginmanager.register(LanePlugin(''))\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    passed_file = tmp_path / "of a commit" / "passed.txt"
    runs = []
    for mended in ({}, {"MENDED": "1"}, {}):
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider", "."],
            env=os.environ | {"PYTHONPATH": str(checkout()), PASSED: str(passed_file)} | mended,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        counts = re.findall(r"(\d+) (passed|skipped|failed|error)", ran.stdout)
        runs.append((ran.returncode, {word: int(n) for n, word in counts}))
    assert runs == [(1, {"passed": 2, "skipped": 1, "failed": 1, "error": 1}), (0, {"passed": 2}), (0, {})]
    assert sorted(passed_file.read_text().split()) == [
        f"test_some.py::test_{name}" for name in ("ends_badly", "is_mended", "passes", "skips")
    ]


def test_a_lane_that_there_is_not(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", "tests/unit/test_lanes.py"],
        env=os.environ | {VARIABLE: "fast"},
        cwd=checkout(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 4
    assert "HEADRACE_TEST_LANE=fast: there is no such lane; lanes: quick, all, long" in ran.stderr
