"""Every call of the local store that changes the disk fails, or is the last one of a killed process, once each.

A reader then sees the old or the new, never a mixture, and a rerun makes the new and leaves nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.storage import Location, local, system
from tests.storage_faults import Killed, faulty
from tests.storage_support import fill_by_two, put_file, put_folder, seen


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "killed"])
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "renames"])
@pytest.mark.parametrize("act", [put_file, put_folder, fill_by_two])
def test_the_nth_call(
    act: Callable[[Location, str], None], exchanges: bool, kills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(system, "exchange", lambda a, b: False)
    completed = 0
    for old in (False, True):
        for n in range(1, 1000):
            home = local(tmp_path / f"{old}-{n}")
            for version in ["old"] if old else []:
                act(home, version)
            old_state = seen(home / "thing")
            home.make_dir()
            with faulty(n, kills) as fault:
                try:
                    act(home, "new")
                    is_done = True
                except (OSError, Killed):
                    is_done = False
            state = seen(home / "thing")
            act(home, "new")
            new = seen(home / "thing")
            # Where two folders cannot exchange their names there is a moment without either; a failure mends it.
            between = [None] if kills and old and not exchanges else []
            assert state in [old_state, new, *between], (old, n)
            if is_done:
                assert state == new
            assert [e.name for e in home.local_path().iterdir() if not kills] in ([], ["thing"]), (old, n)
            if act is not put_file:
                assert [e.name for e in home.local_path().iterdir()] == ["thing"], (old, n)
            completed += 1
            if fault.calls_made < n:
                break
        else:
            raise AssertionError("no end")
    assert completed > 10


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "killed"])
def test_a_new_file_is_whole_or_not_there(tmp_path: Path, kills: bool) -> None:
    for n in range(1, 100):
        home = local(tmp_path / str(n))
        with faulty(n, kills) as fault:
            try:
                written = (home / "log" / "1").put_new_text("new" * 100)
            except (Killed, OSError):
                written = False
        assert seen(home / "log" / "1") in (["new" * 100] if written else [None, "new" * 100])
        if fault.calls_made < n:
            assert written
            return
        # Once more: it is there, or now it is.
        (home / "log" / "1").put_new_text("new" * 100)
        assert seen(home / "log" / "1") == "new" * 100
    raise AssertionError("it never ends")
