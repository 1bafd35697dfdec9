"""Collection of tests: pytest passes over no folder."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from headrace.workspace import checkout


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest looks into no folder with a name of `norecursedirs`: by default "dist" is one."""
    folders = {p.relative_to(checkout()).parent for p in checkout().joinpath("tests").rglob("test_*.py")}
    assert len(folders) > 5
    patterns = pytestconfig.getini("norecursedirs")
    assert [str(f) for f in folders if any(fnmatch(part, p) for part in f.parts for p in patterns)] == []
