"""Objects in stores: faults of calls, and copies on this host."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.storage import Location
from headrace.storage.objects import calls, copies
from tests.storage_support import Killed, faulty, fill_by_two, left_over, memory_home, put_file, put_folder, seen


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


_HOUR, _DAY = 3600, 86_400


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def publish(folder: Location, *names: str) -> Location:
    with folder.new_folder() as building:
        for name in names:
            (building / name).put_text(f"{folder.name} {name}")
    return folder


def age(path: Path, seconds: float) -> None:
    """Set the times of a folder and of all in it back by an age."""
    moment = time.time() - seconds
    for p in (*path.rglob("*"), path):
        os.utime(p, (moment, moment))


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 0))


def test_folders_that_were_asked_for_lately_stay_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = memory_home(monkeypatch, tmp_path)
    old, recent, new = (publish(home / name, "a", "deep/b").local_path() for name in ("old", "asked", "new"))
    for folder in (old, recent):
        age(folder, _HOUR)
    assert (home / "asked").local_path() == recent
    (home / "file").put_text("x")
    with (old / "a").open() as held:
        fill(monkeypatch)
        (home / "file").local_path()
        assert held.read() == "old a"
    assert not old.exists()
    for folder in (recent, new):
        assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["a", "b"]
    assert list((tmp_path / "new").iterdir()) == []
    assert (home / "old").local_path() == old
    assert (old / "deep" / "b").read_text() == "old deep/b"


def test_a_folder_that_goes_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = memory_home(monkeypatch, tmp_path)
    old = publish(home / "old", "a", "b").local_path()
    age(old, _HOUR)
    (home / "file").put_text("x")
    seen = []
    real = copies.system.remove_tree

    def watched(path: Path) -> None:
        seen.append(old.exists())
        real(path)

    monkeypatch.setattr(copies.system, "remove_tree", watched)
    fill(monkeypatch)
    (home / "file").local_path()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("how", ["full disk", "gc"])
def test_what_killed_writers_left_goes_after_a_day(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = memory_home(monkeypatch, tmp_path)
    left, slow, now = (copies.new_path("model.bin") for _ in range(3))
    for path in (left, slow, now):
        path.write_text("x")
    for path in (left, slow):
        age(path.parent, _DAY + _HOUR)
    os.utime(slow)  # it is still written to
    if how == "gc":
        copies.remove_abandoned_uploads()
    else:
        (home / "file").put_text("x")
        fill(monkeypatch)
        (home / "file").local_path()
    assert not left.parent.exists()
    assert slow.exists()
    assert now.exists()


def test_the_uri_of_a_published_folder_names_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = memory_home(monkeypatch, tmp_path)
    model = publish(home / "model", "a", "deep/b", "deep/er/c")

    def files(place: Location) -> list[str]:
        """Return what a program finds that lists the objects below the URI."""
        root = Location(home.path.__class__("/" + place.uri.partition("://")[2]), home.scheme)
        return [f.below(root) for f in root.files()]

    assert files(model) == ["a", "deep/b", "deep/er/c"]
    assert files(model / "deep") == ["b", "er/c"]
    assert files(model / "deep" / "er") == ["c"]
    (model / "deep" / "b").put_text("changed")
    for place in (model, model / "deep"):
        with pytest.raises(OSError, match="has no URI"):
            _ = place.uri
    assert files(model / "deep" / "er") == ["c"]
    assert (model / "deep" / "b").uri.endswith("/deep/b")


def test_a_host_that_knows_its_scratch_alone_has_its_copies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = memory_home(monkeypatch, tmp_path / "given")
    (home / "file").put_text("x")
    monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "scratch"))
    assert (home / "file").local_path().is_relative_to(tmp_path / "given")
    monkeypatch.delenv("HEADRACE_CACHE")
    monkeypatch.setattr(copies, "_workspace_folder", [])
    assert (home / "file").local_path().is_relative_to(tmp_path / "scratch" / "cache")
