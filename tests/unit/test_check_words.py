"""The check of words refuses what is planted, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import check_words

PLAIN = '''"""A module of rows."""


class RowBlock:
    """Rows of one file."""


def matching_rows(rows: list[int]) -> list[int]:
    """Return the rows above `limit`.

    Args:
        rows: numbers, in any order.
    """
    limit = 3
    return [row for row in rows if row > limit]
'''


Check = Callable[[Path], tuple[int, str]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs the check over a folder: exit status and what it prints."""

    def run(path: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check_words.py", str(path)])
        code = check_words.main()
        return code, "".join(capsys.readouterr())

    return run


def test_plain_code_passes(tmp_path: Path, check: Check) -> None:
    (tmp_path / "rows.py").write_text(PLAIN)
    assert check(tmp_path) == (0, "1 files, 0 refusals\n")


@pytest.mark.parametrize(
    ("original", "replacement", "refused"),
    [
        ("    limit = 3", "    limit = found = 3", "rows.py:14: name: 'found'"),
        ("rows: list", "wanted: list", "rows.py:8: name: 'wanted'"),
        ("RowBlock", "Found", "rows.py:4: name: 'Found'"),
        ("def matching_rows", "def _kept", "rows.py:8: name: '_kept'"),
        ("Rows of one file.", "Of a thing.", "rows.py:4: docstring: begins with a fragment: Of a thing."),
        ("A module of rows.", "What it reads.", "rows.py:1: docstring: begins with a fragment: What it reads."),
        ("        rows: ", "        mask, rows: ", "rows.py:8: argument: 'mask' is described, and is no argument"),
        ("`limit`", "`no_such_limit_7f`", "rows.py:8: backticks: `no_such_limit_7f` is nowhere in the code"),
        ("    limit = 3", "    limit = 3  # not `other_limit_7f()`", "rows.py:14: backticks: `other_limit_7f()`"),
    ],
)
def test_what_is_planted_is_refused(
    tmp_path: Path, original: str, replacement: str, refused: str, check: Check
) -> None:
    assert original in PLAIN
    # In pieces, so that no word below exists because this test names it.
    (tmp_path / "rows.py").write_text(PLAIN.replace(original, replacement.replace("_7f", "_7" + "f" * 3)))
    code, output = check(tmp_path)
    assert code == 1
    assert refused.replace("_7f", "_7" + "f" * 3) in output


def test_two_classes_of_one_name_are_refused(tmp_path: Path, check: Check) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(PLAIN)
    code, output = check(tmp_path)
    assert code == 1
    assert "a.py:4: class: RowBlock is also" in output


def test_classes_of_tests_may_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    for folder in ("tests", "python"):
        for name in ("a.py", "b.py"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text('class Rows:\n    """Rows of one file."""\n')
    assert check(tmp_path / "tests") == (0, "2 files, 0 refusals\n")
    assert check(tmp_path / "python")[0] == 1


def test_held_files_by_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_words.py"])
    monkeypatch.setattr(check_words, "HELD", ("*.py",))
    assert check_words.main() == 2, "no file is like the pattern"
    (tmp_path / "a.py").write_text("found = 1\n")
    assert check_words.main() == 1
    assert "a.py:1: name: 'found' does not say" in capsys.readouterr().out


def test_a_folder_in_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    folder = tmp_path / check_words.GATHERED[0]
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n" * 399)
    (folder / "b.py").write_text("y = 1\n")
    assert check(folder) == (0, "2 files, 0 refusals\n")
    (folder / "b.py").write_text("")
    code, output = check(folder)
    assert code == 1
    assert f"{check_words.GATHERED[0]}:1: scatter: 2 files of 399 lines, 5 per 1,000 at most" in output


def test_a_folder_that_is_missing(tmp_path: Path, check: Check) -> None:
    code, output = check(tmp_path / "nowhere")
    assert (code, output) == (2, f"no such file or folder: {tmp_path}/nowhere\n")
