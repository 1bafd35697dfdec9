"""Storage on a file system: files and folders appear whole or not at all, and on the disk before they do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from headrace.errors import UserError
from headrace.errors.stores import StoreRefused
from headrace.storage import Location, local, local_folder, system, uri_fault
from headrace.storage.lease import Held
from headrace.storage.uri import parse_uri


@pytest.fixture
def home(tmp_path: Path) -> Location:
    return local(tmp_path)


def names(folder: Location) -> list[str]:
    """All that is there, unfinished writes too."""
    return sorted(p.name for p in folder.local_path().iterdir())


def test_what_a_killed_attempt_left_is_removed(home: Location) -> None:
    for name in (".x.abc.partial", ".x.abc.old.partial", ".y.abc.partial", ".x.y.abc.partial"):
        (home / name).make_dir()
    with (home / "x").new_folder():
        pass
    assert names(home) == [".x.y.abc.partial", ".y.abc.partial", "x"]
    home.discard_unfinished()
    assert names(home) == ["x"]


def test_many_writers_fill_one_folder(home: Location) -> None:
    final = home / "x"
    first = final.begin("t")
    second = final.building("t")
    assert first == second
    (first / "a").put_text("a")
    (second / "b").put_text("b")
    assert not final.exists()
    final.commit("t")
    assert names(final) == ["a", "b"]


def test_a_link_that_was_made_though_its_answer_was_lost(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS has no rename that replaces nothing, and its client asks again where no answer came."""
    monkeypatch.setattr(system, "_renameat2", lambda: None)
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert (home / "lease").put_new_text("mine")
    assert not (home / "lease").put_new_text("another's")
    assert (home / "lease").read_text() == "mine"
    assert names(home) == ["lease"]


def test_a_store_that_refuses_hides_no_other_error(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Location) -> None:
        raise StoreRefused("s3://b may not be written")

    monkeypatch.setattr(Location, "remove", refuse)
    home.remove_quietly()


# --- what is on the disk when ----------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of each fsync and each rename, in order."""
    seen: list[tuple[str, str]] = []
    fsync, replace, exchange = os.fsync, os.replace, system.exchange

    def fsynced(fd: int) -> None:
        seen.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        fsync(fd)

    def replaced(source: str, target: str) -> None:
        seen.append(("rename", str(target)))
        replace(source, target)

    def exchanged(a: Path, b: Path) -> bool:
        seen.append(("rename", str(b)))
        return exchange(a, b)

    monkeypatch.setattr(os, "fsync", fsynced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(system, "exchange", exchanged)
    return seen


@pytest.mark.parametrize("exists", [False, True])
def test_all_of_a_folder_is_on_the_disk_before_it_appears(
    home: Location, calls: list[tuple[str, str]], exists: bool
) -> None:
    final = home / "x"
    if exists:
        with final.new_folder() as folder:
            (folder / "old").put_text("old")
    calls.clear()
    with final.new_folder() as folder:
        root = str(folder)
        (folder / "a").put_text("a")
        (folder / "deep" / "er" / "b").put_text("b")
        with (folder / "deep" / "c").new_file() as path:
            path.write_text("c")
        (folder / "deep").local_path().joinpath("d").write_text("a library's")
        # Inside, nothing is waited for: all of it is, at the end and once.
        assert [c for c in calls if c[0] == "fsync"] == []
    published = calls.index(("rename", str(final)))
    synced = [path.removeprefix(root) for call, path in calls[:published] if call == "fsync"]
    assert sorted(synced[:4]) == ["/a", "/deep/c", "/deep/d", "/deep/er/b"]
    assert synced[4:] == ["/deep/er", "/deep", ""]
    assert calls[published + 1 :] == [("fsync", str(home))]


def test_a_file_is_on_the_disk_before_it_appears(home: Location, calls: list[tuple[str, str]]) -> None:
    (home / "x").put_text("1")
    (first, partial), second, third = calls
    assert (first, Path(partial).suffix) == ("fsync", ".partial")
    assert (second, third) == (("rename", str(home / "x")), ("fsync", str(home)))


# --- the rest of what a store does -----------------------------------------------------------------------------------


def test_entries_files_and_globs(home: Location) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/d/3.txt"):
        (home / name).put_text(name)
    (home / ".z.12345678.partial").put_text("unfinished")
    assert [e.name for e in home.entries()] == ["a.txt", "b", "c"]
    assert [f.below(home) for f in home.files()] == ["a.txt", "b/1.txt", "b/2.txt", "c/d/3.txt"]
    assert sorted(f.below(home) for f in (home / "**" / "[12].txt").glob()) == ["b/1.txt", "b/2.txt"]
    assert (home / "nowhere").entries() == []
    assert (home / "a.txt").entries() == []


def test_copies_share_their_bytes_or_not(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    source = home / "a"
    source.put_text("1")
    (home / "b" / "linked").copy_from(source, share=True)
    (home / "b" / "apart").copy_from(source)

    def refused(source: Path, target: Path) -> None:
        raise OSError(18, "another device")

    monkeypatch.setattr(system, "link", refused)
    (home / "b" / "copied").copy_from(source, share=True)
    (home / "c").copy_from(home / "b")
    for folder in (home / "b", home / "c"):
        assert {f.name: f.read_text() for f in folder.files()} == dict.fromkeys(("apart", "copied", "linked"), "1")
    same = {f.name for f in (home / "b").entries() if f.local_path().samefile(source)}
    assert same == {"linked"}


def test_removing_what_is_not_there_is_nothing(home: Location) -> None:
    (home / "x").remove()
    (home / "f").put_text("")
    (home / "f").remove()
    (home / "d" / "e" / "f").put_text("")
    (home / "d").remove()
    assert names(home) == []


def test_lines_are_appended(home: Location) -> None:
    (home / "log" / "x").append(b"1\n")
    (home / "log" / "x").append(b"2\n")
    assert (home / "log" / "x").read_text() == "1\n2\n"


def test_a_location_travels(home: Location) -> None:
    place = home / "a"
    assert pickle.loads(pickle.dumps(place)) == place
    assert place.uri == f"file://{home}/a"
    assert os.fspath(place) == str(place.local_path()) == str(place)
    assert place.is_below(home)
    assert not home.is_below(place)
    assert home.free() > 0
    assert (home / "not" / "there").free() > 0


# --- leases ----------------------------------------------------------------------------------------------------------

_HOLD = """
import sys, time
from headrace.storage import local
with local(sys.argv[1]).lease() as lease:
    lease.check()
    print(lease.holder.token, flush=True)
    time.sleep(60)
"""


def test_a_lease_has_one_holder_and_ends_with_it(home: Location) -> None:
    lock = home / "locks" / "clicks.lock"
    assert lock.holder() is None
    holder_process = subprocess.Popen([sys.executable, "-c", _HOLD, str(lock)], stdout=subprocess.PIPE)
    assert holder_process.stdout is not None
    token = int(holder_process.stdout.readline())
    holder = lock.holder()
    assert holder is not None
    assert (holder.process, holder.token) == (holder_process.pid, token)
    with pytest.raises(Held, match=f"process {holder_process.pid} on .* since "), lock.lease():
        pass
    holder_process.kill()
    holder_process.wait()
    assert lock.holder() is None
    with lock.lease() as lease:
        lease.check()
        assert lease.holder.token > token
        assert lock.holder() == lease.holder


def test_a_holder_that_says_nothing_is_unknown(home: Location) -> None:
    lock = home / "l"
    with lock.lease():
        lock.local_path().write_text("process 4")
        with pytest.raises(Held, match="an unknown process"), lock.lease():
            pass


# --- URIs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path"), [("var", "var"), ("/a b", "/a b"), ("file:///a%20b", "/a b"), ("file:/a", "/a"), ("a:b", "a:b")]
)
def test_folders(text: str, path: str) -> None:
    assert local_folder(text, "--home") == Path(path)


@pytest.mark.parametrize(
    "text", ["s3a://b", "S3://b/c", "hdfs://n/x", "gs:/b", "abfss://c@a.net/x", "file://host/a", ""]
)
def test_other_stores_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--home"):
        local_folder(text, "--home")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://me:hunter2@bucket/a", "leave out what is before the @"),
        ("abfss://me:hunter2@account.dfs.core.windows.net/a", "leave out what is before the @, but for the container"),
        (
            "abfss://box:hunter2@me@account.dfs.core.windows.net/a",
            "leave out what is before the @, but for the container",
        ),
        ("abfss://account.dfs.core.windows.net/a", "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"),
        ("abfss://box@account.dfs.core.windows.net/a?sig=hunter2", "write abfss://CONTAINER@ACCOUNT"),
        ("gs://bucket/a?x=1", "write gs://BUCKET/FOLDER"),
    ],
)
def test_uris_hold_no_secret(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as e:
        parse_uri(text, "lake")
    assert "hunter2" not in str(e.value)


def test_the_container_of_azure_is_no_secret() -> None:
    path = PurePosixPath("/box@account.dfs.core.windows.net/a/b")
    assert parse_uri("abfs://box@account.dfs.core.windows.net/a/b", "lake") == ("abfss", path)


def test_a_path_is_no_uri() -> None:
    assert uri_fault("/data/{ds}/*.gz") is None
    assert "'s3a://b/*.gz' is a URI, and this takes a path" in (uri_fault("s3a://b/*.gz") or "")
    assert "write it as a path" in (uri_fault("file:///b") or "")
