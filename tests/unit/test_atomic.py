"""Files and folders appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.atomic import new_directory, write_text


def test_write_text_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_new_directory_is_invisible_until_done(tmp_path: Path) -> None:
    final = tmp_path / "x"
    with new_directory(final) as partial:
        (partial / "f").write_text("1")
        assert not final.exists()
    assert (final / "f").read_text() == "1"


def test_new_directory_keeps_the_old_one_on_failure(tmp_path: Path) -> None:
    final = tmp_path / "x"
    with new_directory(final) as partial:
        (partial / "f").write_text("old")

    def fail_half_way() -> None:
        with new_directory(final) as partial:
            (partial / "f").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert (final / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_new_directory_removes_what_a_killed_attempt_left(tmp_path: Path) -> None:
    (tmp_path / ".x.abc.partial").mkdir()
    (tmp_path / ".y.abc.partial").mkdir()
    with new_directory(tmp_path / "x"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [".y.abc.partial", "x"]
