"""The contract of stores of each kind: on file systems of more and of fewer calls, and of objects."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.errors import EXIT_USER_ERROR
from headrace.errors.stores import ChangedInPlace
from headrace.errors.translate import exit_message
from headrace.lake.landing.files import LandingFile
from headrace.storage import Location, local, location, not_as_written, system
from headrace.storage.objects import calls
from headrace.storage.objects.store import ObjectStore
from tests.storage_support import hdfs_home, home_of, left_over, memory_home

LOCAL = ["local", "local, no rename that replaces nothing", "local, no exchange of names"]


@pytest.fixture(params=[*LOCAL, "memory", pytest.param("hdfs", marks=[pytest.mark.service, pytest.mark.extra])])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    kind, _, lacks = request.param.partition(", ")
    if kind == "hdfs":
        return hdfs_home(monkeypatch, tmp_path / "cache", request.getfixturevalue("hdfs_server"))
    if lacks.startswith("no rename"):
        monkeypatch.setattr(system, "_renameat2", lambda: None)
    elif lacks:
        monkeypatch.setattr(system, "exchange", lambda a, b: False)
    return home_of(kind, tmp_path, monkeypatch)


def names(folder: Location) -> list[str]:
    return [f.below(folder) for f in folder.files()]


def test_a_file_is_replaced(home: Location) -> None:
    file = home / "a" / "b.json"
    assert not file.exists()
    file.put_text("one")
    file.put_text("zwei ä")
    assert file.read_text() == "zwei ä"
    assert file.size() == len("zwei ä".encode())
    assert file.is_file()
    assert not file.is_dir()
    assert (home / "a").is_dir()
    assert not (home / "a").is_file()
    assert names(home) == ["a/b.json"]
    assert left_over(home) == []


def test_what_is_not_there(home: Location) -> None:
    for call in (Location.read_text, Location.size, Location.open):
        with pytest.raises(FileNotFoundError):
            call(home / "x")
    assert (home / "x").entries() == []
    (home / "x").remove()
    assert not (home / "x").exists()


def test_a_new_file_has_one_writer(home: Location) -> None:
    def write(n: int) -> bool:
        return (home / "log" / "1").put_new_text(f"{n}" * 10_000)

    with ThreadPoolExecutor(8) as pool:
        won = [n for n, has_won in enumerate(pool.map(write, range(8))) if has_won]
    assert len(won) == 1
    assert (home / "log" / "1").read_text() == f"{won[0]}" * 10_000
    assert names(home) == ["log/1"]


def test_a_condition_is_locked_as_nfs_asks_and_nothing_lists_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive lock of NFS is of a file that is open for writing."""
    real, locked = fcntl.flock, []

    def nfs(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(fd, operation)
        locked.append(fd)

    monkeypatch.setattr(fcntl, "flock", nfs)
    home = local(tmp_path)
    file = home / "a" / "x.json"
    assert file.put_if(b"1", None)
    tagged = file.read_tagged()
    assert tagged is not None
    assert file.put_if(b"2", tagged[1])
    assert not file.put_if(b"3", tagged[1])
    assert file.read_bytes() == b"2"
    assert len(locked) == 2
    assert names(home) == ["a/x.json"]
    assert [f.name for f in (home / "a").entries()] == ["x.json"]
    assert [f.name for f in (home / "a" / "*").glob()] == ["x.json"]
    home.discard_unfinished()
    (home / "a").remove()
    assert home.entries() == []


def test_of_many_who_replace_a_file_each_does_so_once(home: Location) -> None:
    """Each adds itself to what it read, until nobody was between: none is lost."""
    file = home / "a" / "names"
    file.put_text("")

    def add(n: int) -> None:
        while True:
            tagged = file.read_tagged()
            assert tagged is not None
            if file.put_if(tagged[0] + f"{n} ".encode(), tagged[1]):
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(20)))
    assert sorted(map(int, file.read_text().split())) == list(range(20))


def test_a_new_file_is_not_there_until_the_block_ends_well(home: Location) -> None:
    file = home / "x"
    with file.new_file() as path:
        path.write_text("1")
        assert not file.exists()
        assert home.entries() == []
    assert file.read_text() == "1"

    def fail() -> None:
        with file.new_file() as path:
            path.write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert file.read_text() == "1"
    assert left_over(home) == []


def test_a_new_folder_is_invisible_until_done(home: Location) -> None:
    final = home / "x"
    with final.new_folder() as folder:
        (folder / "f").put_text("1")
        (folder / "deep" / "g").put_text("2")
        assert (folder / "f").read_text() == "1"
        assert names(folder) == ["deep/g", "f"]
        assert not final.exists()
        assert not (final / "f").exists()
        assert home.entries() == []
    assert (final / "f").read_text() == "1"
    assert [e.name for e in home.entries()] == ["x"]
    assert [e.name for e in final.entries()] == ["deep", "f"]
    assert (final / "deep").is_dir()
    assert not (final / "nowhere").is_dir()
    assert names(home) == ["x/deep/g", "x/f"]
    assert (final / "deep" / "g").size() == 1


def test_a_new_folder_replaces_the_old_one(home: Location) -> None:
    final = home / "x"
    for text in ("1", "2"):
        with final.new_folder() as folder:
            (folder / text).put_text(text)
            (folder / "both").put_text(text)
            assert (final / "1").exists() == (text == "2")
    assert names(final) == ["2", "both"]
    assert (final / "both").read_text() == "2"
    assert left_over(home) == []


def test_a_failed_folder_leaves_the_old_one(home: Location) -> None:
    final = home / "x"
    with final.new_folder() as folder:
        (folder / "f").put_text("old")

    def fail_half_way() -> None:
        with final.new_folder() as folder:
            (folder / "f").put_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert (final / "f").read_text() == "old"
    assert left_over(home) == []


def test_what_a_killed_attempt_left_is_removed(home: Location) -> None:
    for name in ("x", "y"):
        ((home / name).begin("t") / "f").put_text("unfinished")
    assert home.entries() == []
    assert len([n for n in left_over(home) if n.endswith("/f")]) == 2
    with (home / "x").new_folder() as folder:
        (folder / "f").put_text("new")
    assert len([n for n in left_over(home) if n.endswith("/f")]) == 1
    home.discard_unfinished()
    assert left_over(home) == []
    assert names(home) == ["x/f"]


def test_what_a_killed_attempt_left_in_a_folder_of_its_own_is_found(home: Location) -> None:
    """`headrace gc` looks for it from folder to folder."""
    ((home / "day" / "x").begin("t") / "f").put_text("unfinished")
    assert [e.name for e in home.entries() if e.is_dir()] == ["day"]
    assert (home / "day").entries() == []
    (home / "day").discard_unfinished()
    assert left_over(home) == []


def test_many_writers_fill_one_folder_again_and_again(home: Location) -> None:
    final = home / "x"
    for text in ("old", "new", "newer"):
        first = final.begin("t")
        second = final.building("t")
        assert first == second
        (first / "a").put_text(text)
        (second / f"only {text}").put_text(text)
        assert final.exists() == (text != "old")
        if text != "old":
            assert (final / "a").read_text() != text
        final.commit("t")
        assert names(final) == ["a", f"only {text}"]
        assert (final / "a").read_text() == text
    assert left_over(home) == []


def test_two_that_make_the_same_folder(home: Location) -> None:
    final = home / "x"
    with final.new_folder(alone=False) as first, final.new_folder(alone=False) as second:
        for folder in (first, second):
            (folder / "a").put_text("same")
    assert names(final) == ["a"]
    assert (final / "a").read_text() == "same"


def test_a_folder_in_a_folder_that_is_filled(home: Location) -> None:
    with (home / "x").new_folder() as folder:
        with (folder / "inner").new_folder() as inner:
            (inner / "a").put_text("a")
        assert names(folder) == ["inner/a"]
        (folder / "b").put_text("b")
    assert names(home) == ["x/b", "x/inner/a"]
    assert (home / "x" / "inner" / "a").read_text() == "a"
    assert (home / "x" / "inner").is_dir()


def test_files_of_a_published_folder_are_changed(home: Location) -> None:
    with (home / "x").new_folder() as folder:
        for name in ("a", "b", "deep/c", "deep/d"):
            (folder / name).put_text(name)
    (home / "x" / "a").put_text("changed")
    (home / "x" / "e").put_text("added")
    with (home / "x" / "f").new_file() as path:
        path.write_text("by a library")
    (home / "x" / "b").remove()
    (home / "x" / "deep").remove()
    assert {f.below(home): f.read_text() for f in home.files()} == {
        "x/a": "changed",
        "x/e": "added",
        "x/f": "by a library",
    }
    assert left_over(home) == []
    (home / "x").remove()
    assert home.entries() == []
    assert not (home / "x" / "a").exists()
    assert left_over(home) == []


def test_entries_files_and_globs(home: Location) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/d/3.txt", "e/.hidden"):
        (home / name).put_text(name)
    with (home / "p").new_folder() as folder:
        (folder / "q" / "4.txt").put_text("4")
    assert [e.name for e in home.entries()] == ["a.txt", "b", "c", "e", "p"]
    assert names(home) == ["a.txt", "b/1.txt", "b/2.txt", "c/d/3.txt", "e/.hidden", "p/q/4.txt"]
    assert sorted(f.below(home) for f in (home / "**" / "[12].txt").glob()) == ["b/1.txt", "b/2.txt"]
    assert (home / "nowhere").entries() == []
    assert (home / "a.txt").entries() == []
    assert [e.below(home) for e in (home / "p" / "q").entries()] == ["p/q/4.txt"]
    (home / "b").remove()
    assert [e.name for e in home.entries()] == ["a.txt", "c", "e", "p"]


def test_copies(home: Location, tmp_path: Path) -> None:
    (home / "a").put_text("1")
    with (home / "p").new_folder() as folder:
        (folder / "q" / "b").put_text("2")
    (home / "c").copy_from(home / "p")
    (home / "d").copy_from(home / "a", share=True)
    assert {f.below(home): f.read_text() for f in home.files()} == {"a": "1", "c/q/b": "2", "d": "1", "p/q/b": "2"}
    elsewhere = local(tmp_path / "elsewhere")
    elsewhere.copy_from(home / "p")
    (home / "back").copy_from(elsewhere)
    assert (home / "back" / "q" / "b").read_text() == "2"
    with (home / "m").new_folder() as folder:
        (folder / "x").put_text("x")
        (folder / "x").move_to(folder / "y")
    assert names(home / "m") == ["y"]


def test_lines_are_appended(home: Location) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: (home / "log" / "x").append(f"{n}\n".encode()), range(20)))
    assert sorted(map(int, (home / "log" / "x").read_text().split())) == list(range(20))


def test_local_paths(home: Location) -> None:
    (home / "a.npy").put_bytes(b"1" * 100)
    with (home / "p").new_folder() as folder:
        (folder / "deep" / "b.txt").put_text("b")
        (folder / "c.txt").put_text("c")
    assert (home / "a.npy").local_path().read_bytes() == b"1" * 100
    assert (home / "a.npy").local_path().name == "a.npy"
    with open(home / "p" / "c.txt") as f:
        assert f.read() == "c"
    folder_path = (home / "p").local_path()
    contents = {str(p.relative_to(folder_path)): p.read_text() for p in folder_path.rglob("*") if p.is_file()}
    assert contents == {"deep/b.txt": "b", "c.txt": "c"}
    (home / "a.npy").put_bytes(b"2" * 100)
    assert (home / "a.npy").local_path().read_bytes() == b"2" * 100


def test_a_location_travels(home: Location) -> None:
    place = home / "a"
    place.put_text("1")
    assert pickle.loads(pickle.dumps(place)) == place
    assert os.fspath(place) == str(place.local_path())
    assert place.is_below(home)
    assert not home.is_below(place)
    assert home.free() is None or home.free() > 0


def test_a_large_file_is_read_in_order_and_here_and_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.storage.objects.store._SMALL", 1000)
    monkeypatch.setattr("headrace.storage.objects.store.BLOCK", 333)
    home = memory_home(monkeypatch, tmp_path)
    data = os.urandom(10_000)
    (home / "x").put_bytes(data)
    with (home / "x").open() as f:
        assert f.read(10) == data[:10]
        f.seek(-100, os.SEEK_END)
        assert f.read() == data[-100:]
        f.seek(5000)
        assert f.read(2000) == data[5000:7000]
    assert (home / "x").read_bytes() == data


def test_files_that_are_not_as_they_were_written(home: Location) -> None:
    with (home / "p").new_folder() as folder:
        for name in "abc":
            (folder / name).put_text(name)
    sizes = {home / "p" / name: 1 for name in "abc"}
    assert not_as_written(sizes) is None
    assert not_as_written({}) is None
    assert not_as_written(sizes | {home / "p" / "b": 2}) == f"{home / 'p' / 'b'} has 1 bytes, not 2"
    for absent in (home / "p" / "d", home / "p" / "a" / "d"):
        assert not_as_written(sizes | {absent: 1}) == f"{absent} is gone"


def test_a_damaged_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = memory_home(monkeypatch, tmp_path)
    with (home / "p").new_folder() as folder:
        (folder / "a").put_text("right")
        physical = folder / "a"
    store = location.STORES[physical.scheme]
    assert isinstance(store, ObjectStore)
    tree, key = store._resolve(physical.path)
    calls.put(tree.bucket, key, b"wrong")
    for read in (Location.local_path, Location.read_bytes):
        with pytest.raises(ChangedInPlace, match="changed in place") as raised:
            read(home / "p" / "a")
        message, code = exit_message(raised.value) or ("", 0)
        assert code == EXIT_USER_ERROR
        assert physical.below(home) in message
        assert "delete the folder that the file is in, and run the stage again" in message
    assert not LandingFile("a", home / "p" / "a", 5, 0).unchanged()
    assert not_as_written({home / "p" / "a": 5}) == f"{home / 'p' / 'a'} was changed in place"


def test_what_another_process_publishes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_home = memory_home(monkeypatch, tmp_path, readers=("other",))
    other_home = Location(own_home.path, "other")
    for text in ("1", "2"):
        with (other_home / "p").new_folder() as folder:
            (folder / "a").put_text(text)
            (folder / text).put_text("x")
        assert (own_home / "p" / "a").read_text() == text
        assert (own_home / "p" / text).exists()
        assert names(own_home / "p") == [text, "a"]
    (other_home / "p").remove()
    assert not (own_home / "p").exists()
    assert not (own_home / "p" / "a").exists()


_NAME = st.text("ab.[]", min_size=1, max_size=3).filter(lambda n: n not in (".", ".."))
_PARTS = ["*", "**", "a*", "?", "[ab]*", "[!a]", "[[]*", "[^a]", "a", "b", ".*", "*b?"]
# No `**` at the end: the standard library then finds the folder before it, whether it is there or not.
_PATTERN = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=3).filter(lambda p: p[-1] != "**")


@given(paths=st.lists(st.lists(_NAME, min_size=1, max_size=3), max_size=6), pattern=_PATTERN)
@example(paths=[["a"], ["b"], ["^"]], pattern=["[^a]"])
@example(paths=[["a"], ["["]], pattern=["[[]"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_globs_are_those_of_the_standard_library(
    paths: list[list[str]], pattern: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("glob")
        home = memory_home(patch, folder / "cache")
        for path in paths:
            file = folder / "home" / Path(*path)
            if file.exists() or any(p.is_file() for p in file.parents):
                continue
            local(file).put_text("x")
            (home / "/".join(path)).put_text("x")
        text = "/".join(pattern)
        expected = {p.rstrip("/") for p in glob(text, root_dir=folder / "home", recursive=True)} - {""}  # noqa: PTH207
        assert {p.below(home) for p in (home / text).glob()} == expected


def test_all_files_below_a_folder_at_once(home: Location) -> None:
    (home / "a" / "b.json").put_text("ä")
    (home / "a" / "c" / "d e").put_text("333")
    assert {name: info.size for name, info in (home / "a").infos().items()} == {"b.json": 2, "c/d e": 3}
    assert (home / "a").infos() == {name: (home / "a" / name).info() for name in ("b.json", "c/d e")}
    assert (home / "a").as_plain().infos() == (home / "a").infos()
    assert (home / "x").infos() == {}
    info_before = (home / "a" / "b.json").info()
    (home / "a" / "b.json").put_text("aa")
    assert (home / "a" / "b.json").info() != info_before


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(116, "stale"), OSError(5, "damaged")])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    for day in ("day=1", "day=2"):
        (local(tmp_path) / "a" / day / "x").put_text("x")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("day=2"):
            raise error
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(type(error)):
        (local(tmp_path) / "a").infos()
    assert (local(tmp_path) / "a" / "day=1" / "x").infos() == {}


def test_parts_of_a_file(home: Location) -> None:
    data = bytes(range(256)) * 2_000
    (home / "a").put_bytes(data)
    with (home / "a").open_parts() as f:
        assert f.seek(-3, 2) == len(data) - 3
        assert f.read() == data[-3:]
        f.seek(100_000)
        assert f.read(200_000) == data[100_000:300_000]
    with pytest.raises(FileNotFoundError):
        (home / "x").open_parts()


def test_a_folder_of_others_has_the_files_that_are_in_it(home: Location) -> None:
    """A published one has them where its list says; whoever looks at it so sees none of them."""
    with (home / "made").new_folder() as folder:
        (folder / "a").put_text("1")
    (home / "plain" / "a").put_text("1")
    foreign = (home / "plain").as_plain()
    assert [f.below(foreign) for f in foreign.files()] == ["a"]
    assert (foreign / "a").read_text() == "1"
    assert foreign == home / "plain"
    assert pickle.loads(pickle.dumps(foreign)).plain
    if home.scheme != "file":
        assert (home / "made").as_plain().infos() == {}
        assert foreign.uri == str(foreign)


def test_names_after_a_name(home: Location) -> None:
    for name in ("00", "01", "01.json", "02", "_x"):
        (home / "log" / name).put_text(name)
    (home / "log" / "deep" / "f").put_text("f")
    assert (home / "log").names() == ["00", "01", "01.json", "02", "_x", "deep"]
    assert (home / "log").names(after="01") == ["01.json", "02", "_x", "deep"]
    assert (home / "log").names(after="deeper") == []
    assert (home / "none").names(after="a") == []
