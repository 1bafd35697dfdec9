"""The glossary names classes and modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.workspace import checkout

ROWS = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| `([\w/.]+)`((?:,? `\w+`)*) \|$", (checkout() / "docs" / "glossary.md").read_text(), re.M
)


def test_each_line_is_read() -> None:
    lines = (checkout() / "docs" / "glossary.md").read_text().splitlines()
    assert len(ROWS) == sum(line.startswith("| ") and not line.startswith("| term") for line in lines)


@pytest.mark.parametrize(("term", "place", "classes"), ROWS)
def test_what_a_term_names_exists(term: str, place: str, classes: str) -> None:
    path = checkout() / "python" / place
    files = [path] if path.is_file() else sorted(Path(path).rglob("*.py"))
    assert files, f"{term}: there is no {place}"
    code = "\n".join(file.read_text() for file in files)
    assert [name for name in re.findall(r"\w+", classes) if f"class {name}" not in code] == []
