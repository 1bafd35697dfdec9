"""The split of landing files into parts for cores, and the imports of the tasks that read them."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.landing.arrow_rows import PART_BYTES, part_size

MIB = 1 << 20


def most(sizes: list[int], part: int, cores: int) -> int:
    """Bytes of the busiest core: the next part to whoever is free, the largest first."""
    parts = [size // count for size in sizes for count in [-(-size // part)] for _ in range(count)]
    busy = [0] * cores
    for size in sorted(parts, reverse=True):
        busy[busy.index(min(busy))] += size
    return max(busy)


@given(st.lists(st.integers(1, 900 * MIB), min_size=1, max_size=12), st.integers(1, 8))
def test_no_core_has_much_more_than_its_share(sizes: list[int], cores: int) -> None:
    part = part_size(sizes, cores)
    assert PART_BYTES <= part <= 4 * PART_BYTES
    assert most(sizes, part, cores) <= max(1.1 * sum(sizes) / cores, sum(sizes) / cores + part)


def test_even_files_stay_whole_and_others_do_not() -> None:
    assert part_size([150 * MIB, 149 * MIB, 151 * MIB, 150 * MIB], 2) >= 151 * MIB
    assert part_size([300 * MIB, 10 * MIB], 2) < 150 * MIB
    assert part_size([600 * MIB] * 4, 2) == 256 * MIB
    assert part_size([], 2) == 256 * MIB


def test_tasks_that_read_lines_import_no_specs() -> None:
    """The classes of specs take longer to make than a task of a small day does."""
    code = "import sys, headrace.lake.landing.read_lines as r; print(*(m for m in sys.modules if '.config' in m))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in modules if name.startswith("headrace.")] == []
