"""The lanes of tests: each test is in one, and a lane runs what it selects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain, combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.installation import checkout
from tests.lanes import (
    DRAWN_PARTS,
    EACH_RUN,
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


def run_pytest(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest on the tests of a folder, with the plugins that lanes need alone: they load faster."""
    plugins = ["_hypothesis_pytestplugin", *(["xdist.plugin"] if "-n" in options else [])]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"-p{p}" for p in plugins), *options, "."],
        env=os.environ | {"PYTHONPATH": str(checkout()), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
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
    for prefix in [*QUICK_JVM, *SLOW, *EACH_RUN]:
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
    assert markers_of("tests/unit/test_any.py", ["spark"], []) == {"jvm", "slow", "drawn"}
    assert markers_of("tests/unit/test_any.py", [], ["jvm"]) == {"slow", "drawn"}
    assert markers_of("tests/unit/test_any.py", ["tmp_path"], []) == set()
    assert markers_of("tests/rack/test_any.py", [], []) == {"jvm", "rack", "extra", "slow", "drawn"}


def test_slow_tests_are_drawn_unless_each_run_takes_them() -> None:
    assert all(
        {"slow", "drawn"} & markers_of(f"{prefix}::test_any", ["spark"], ["jvm"]) == {"slow"} for prefix in EACH_RUN
    )
    assert markers_of("tests/spark/test_any.py::test_any", [], []) == {"jvm", "slow", "drawn"}
    assert markers_of("tests/unit/test_any.py::test_any", [], ["slow"]) == {"drawn"}
    assert all(markers_of(prefix, [], []) >= {"slow", "drawn"} for prefix in SLOW if not prefix.startswith(EACH_RUN))
    assert not [prefix for prefix in QUICK_JVM if "drawn" in markers_of(prefix, ["spark"], [])]


def test_a_file_is_in_one_part_and_each_part_has_some() -> None:
    files = [str(path.relative_to(checkout())) for path in (checkout() / "tests" / "spark").glob("test_*.py")]
    assert {part_of(f"{file}::test_any[a::b]") for file in files} == set(range(DRAWN_PARTS))
    assert all(part_of(f"{file}::test_any") == part_of(f"{file}::test_other") for file in files)


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
        ("long", {"passed": 4, "deselected": 4}),
    ],
)
def test_a_run_of_a_lane(lane: str, expected: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "conftest.py").write_text(
        "import os\nfrom tests.lanes import LanePlugin\n"
        f"def pytest_configure(config): config.pluginmanager.register(LanePlugin({lane!r}))\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    long\n    jvm\n    drawn\n")
    ran = run_pytest(tmp_path, "-s", env={SEED: str(part_of("test_some.py"))})
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|failed|deselected)", ran.stdout)}
    if examples := re.search(r"examples (\d+) \1", ran.stdout):
        counted["examples"] = int(examples[1])
    assert counted == expected, ran.stdout + ran.stderr
    assert ("mark the test `extra`" in ran.stdout) == (lane in ("quick", "all"))


def test_seeds_one_after_the_other_take_each_drawn_test_once(tmp_path: Path) -> None:
    for n in range(7):
        (tmp_path / f"test_{n}.py").write_text(
            "import pytest\n@pytest.mark.slow\ndef test_drawn(): pass\ndef test_each_run(): pass\n"
        )
    (tmp_path / "conftest.py").write_text(
        "from tests import lanes\nlanes.DRAWN_PARTS = 3\n"
        "def pytest_configure(config): config.pluginmanager.register(lanes.LanePlugin('all'))\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    drawn\n    slow\n    long\n")
    taken: list[str] = []
    for seed in range(100, 103):
        ran = run_pytest(tmp_path, "--collect-only", env={SEED: str(seed)})
        tests = re.findall(r"test_(\d)\.py::(\S+)", ran.stdout)
        assert [n for n, test in tests if test == "test_each_run"] == [*"0123456"], ran.stdout + ran.stderr
        taken += [n for n, test in tests if test == "test_drawn"]
    assert sorted(taken) == [*"0123456"]


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_a_run_goes_on_where_another_stopped(processes: tuple[str, ...], tmp_path: Path) -> None:
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
        ran = run_pytest(tmp_path, *processes, env={PASSED: str(passed_file)} | mended)
        counts = re.findall(r"(\d+) (passed|skipped|failed|error)", ran.stdout)
        runs.append((ran.returncode, {word: int(n) for n, word in counts}))
    assert runs == [(1, {"passed": 2, "skipped": 1, "failed": 1, "error": 1}), (0, {"passed": 2}), (0, {})]
    assert sorted(passed_file.read_text().split()) == [
        f"test_some.py::test_{name}" for name in ("ends_badly", "is_mended", "passes", "skips")
    ]


def test_a_lane_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os\nfrom tests.lanes import VARIABLE, LanePlugin\n"
        "def pytest_configure(config): config.pluginmanager.register(LanePlugin(os.environ[VARIABLE]))\n"
    )
    ran = run_pytest(tmp_path, "--collect-only", env={VARIABLE: "fast"})
    assert ran.returncode == 4
    assert "HEADRACE_TEST_LANE=fast: there is no such lane; lanes: quick, all, long" in ran.stderr
