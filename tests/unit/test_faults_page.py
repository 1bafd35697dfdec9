"""docs/faults.md names tests that exist, and for each row one that every run of `make test-all` takes."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from headrace.workspace import checkout
from tests.lanes import part_of

PAGE = (checkout() / "docs" / "faults.md").read_text()
#: (line of the report, the last cell) of each row.
ROWS = re.findall(r"^\| ([A-G]\d) \|.*\| ([^|]+) \|$", PAGE, re.M)
#: Lines of the report.
LINES = [
    f"{part}{n}" for part, count in zip("ABCDEFG", (2, 2, 2, 7, 6, 4, 4), strict=True) for n in range(1, count + 1)
]
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@cache
def decorators(file: str) -> dict[str, str]:
    """Return the markers of a file's tests: by the function's name, with those of the whole file."""
    module = ast.parse((checkout() / file).read_text())
    of_file = [
        ast.unparse(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: " ".join([*of_file, *map(ast.unparse, node.decorator_list)]) for node in functions}


def test_each_line_of_the_report_has_rows_and_each_row_a_test() -> None:
    assert list(dict.fromkeys(line for line, _ in ROWS)) == LINES
    assert len(ROWS) == len(re.findall(r"^\| [A-G]\d ", PAGE, re.M))
    assert [(line, cell) for line, cell in ROWS if not re.fullmatch(r"`tests/[^`]+`(, `tests/[^`]+`)*", cell)] == []
    # None: not of those of which a run takes a part.
    in_each_run = [any(part_of(test) is None for test in re.findall(r"`([^`]+)`", cell)) for _, cell in ROWS]
    assert [row for row, is_in in zip(ROWS, in_each_run, strict=True) if not is_in] == []


@pytest.mark.parametrize("file", sorted({file for file, _ in TESTS}))
def test_the_named_tests_are_in_the_lane(file: str) -> None:
    names = [name for named_file, name in TESTS if named_file == file]
    assert [name for name in names if name not in decorators(file)] == []
    assert [name for name in names if "mark.long" in decorators(file)[name]] == []
