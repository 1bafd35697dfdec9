"""Every call of a store of objects fails, is not answered, or is the last one of a killed process, once each.

A reader then sees the old or the new, never a mixture, and a rerun makes the new and leaves nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.storage import Location
from headrace.storage.objects import calls
from tests.storage_faults import Killed, faulty
from tests.storage_homes import left_over, memory_home
from tests.storage_support import fill_by_two, put_file, put_folder, seen


def upload_file(home: Location, text: str) -> None:
    with (home / "thing").new_file() as path:
        path.write_text(text)


def change_a_published_folder(home: Location, text: str) -> None:
    thing = home / "thing"
    if not thing.exists():
        put_folder(home, "first")
    (thing / "a").put_text(text)


@pytest.mark.parametrize("how", ["fails", "is not answered", "killed"])
@pytest.mark.parametrize("act", [put_file, upload_file, put_folder, fill_by_two, change_a_published_folder])
def test_the_nth_call(
    act: Callable[[Location, str], None], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = 0
    for old in (False, True):
        for n in range(1, 200):
            writer = memory_home(monkeypatch, tmp_path, readers=("reader",))
            home, reader = writer, Location(writer.path, "reader")
            between = []
            if old:
                act(home, "old")
            elif act is change_a_published_folder:
                put_folder(home, "first")
            old_state = seen(reader / "thing")
            with faulty(n, how == "killed", calls, done=how == "is not answered") as fault:
                try:
                    act(home, "new")
                    is_done = True
                except (OSError, Killed):
                    is_done = False
            state, warm = seen(reader / "thing"), seen(home / "thing")
            act(home, "new")
            new = seen(reader / "thing")
            assert state in [old_state, new, *between], (old, n)
            assert warm == state, (old, n)
            assert new != old_state
            if is_done:
                assert state == new
            home.discard_unfinished()
            assert left_over(home) == [], (old, n)
            completed += 1
            if fault.calls_made < n:
                break
        else:
            raise AssertionError("no end")
    assert completed > 2


@pytest.mark.parametrize("how", ["fails", "is not answered", "killed"])
def test_removal(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(1, 100):
        home = memory_home(monkeypatch, tmp_path)
        put_folder(home, "old")
        old_state = seen(home / "thing")
        with faulty(n, how == "killed", calls, done=how == "is not answered") as fault:
            try:
                (home / "thing").remove()
                is_done = True
            except (OSError, Killed):
                is_done = False
        assert seen(home / "thing") in ([None] if is_done else [None, old_state])
        (home / "thing").remove()
        assert not (home / "thing").exists()
        assert left_over(home) == []
        if fault.calls_made < n:
            assert is_done
            return
    raise AssertionError("no end")
