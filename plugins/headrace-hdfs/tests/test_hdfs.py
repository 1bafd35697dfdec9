"""The store in HDFS, against a NameNode and a DataNode: files that are replaced on a condition, deaths, refusals."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.stores import StoreAway, StoreError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.storage import Location, location
from headrace.storage.lease import Held
from headrace.storage.objects import calls
from headrace_hdfs import rpc, store
from headrace_hdfs.store import HdfsBucket, HdfsStore
from tests.hadoop_servers import Hdfs
from tests.storage_support import Killed, faulty, hdfs_home, left_over, put_file, put_folder, seen


@pytest.fixture
def home(hdfs_server: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    return hdfs_home(monkeypatch, tmp_path / "cache", hdfs_server, readers=("other",))


def of_other(place: Location) -> Location:
    """The same place for another process."""
    return Location(place.path, "other")


def read(place: Location) -> tuple[bytes, str]:
    tagged = place.read_tagged()
    assert tagged is not None
    return tagged


# --- files that are replaced on a condition --------------------------------------------------------------------------


def test_every_write_has_a_tag_of_its_own(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the same size, and where the NameNode's clock was set back since."""
    file = home / "a"
    assert file.put_if(b"0", None)
    info = file.info()
    bucket_, key = location.STORES["hdfs"]._resolve(file.path)  # type: ignore[attr-defined]
    rpc.set_modified(bucket_.bucket._node, f"/{key}", info.modified_ns // 1_000_000 + 3_600_000)
    tags, times = [read(file)[1]], [file.info().modified_ns]
    for n in range(1, 4):
        assert file.put_if(f"{n}".encode(), tags[-1])
        tags.append(read(file)[1])
        times.append(file.info().modified_ns)
    assert times == sorted(set(times))
    assert [file.put_if(b"x", tag) for tag in tags[:3]] == [False] * 3
    assert file.read_bytes() == b"3"


def test_what_is_put_without_a_condition_has_a_tag_of_its_own(home: Location) -> None:
    """Also of the same size, and where the NameNode's clock was set back since: copies are named after it."""
    file = home / "a"
    file.put_text("0")
    bucket_, key = location.STORES["hdfs"]._resolve(file.path)  # type: ignore[attr-defined]
    hour_later = file.info().modified_ns // 1_000_000 + 3_600_000
    rpc.set_modified(bucket_.bucket._node, f"/{key}", hour_later)
    times = [file.info().modified_ns]
    for n in range(1, 4):
        assert file.local_path().read_text() == str(n - 1)
        file.put_text(str(n))
        times.append(file.info().modified_ns)
    assert times == sorted(set(times))


def test_turns_that_are_ended_too_early_lose_nothing(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer takes all others for dead at once: what holds does not rest on how long anybody waits."""
    monkeypatch.setattr(store, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(store, "_POLL_SECONDS", 0.0)
    (home / "names").put_text("")

    def add(n: int) -> None:
        file = (home if n % 2 else of_other(home)) / "names"
        while True:
            text, tag = read(file)
            if file.put_if(text + f"{n} ".encode(), tag):
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(24)))
    assert sorted(map(int, (home / "names").read_text().split())) == list(range(24))
    home.discard_unfinished()
    assert left_over(home) == []


@pytest.mark.parametrize("then", ["replaced", "removed", "removed and written anew", "removed by -rm and written anew"])
def test_who_sleeps_between_its_look_and_its_rename(then: str, home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TURN_SECONDS", 0.0)
    file, other_writer = home / "manifest", of_other(home / "manifest")
    file.put_text("old")
    _, tag = read(file)
    real = rpc.rename_over

    def late(client: Any, source: str, target: str) -> None:
        monkeypatch.setattr(rpc, "rename_over", real)
        if then == "replaced":
            assert other_writer.put_if(b"theirs", tag)
        elif "-rm" in then:  # another program, which knows of no turns
            assert client.client.delete(target, False)
        else:
            other_writer.remove()
        if then.endswith("anew"):
            assert other_writer.put_if(b"theirs", None)
        real(client, source, target)

    monkeypatch.setattr(rpc, "rename_over", late)
    assert not file.put_if(b"mine", tag)
    assert seen(file) == (None if then == "removed" else "theirs")
    home.discard_unfinished()
    assert left_over(home) == []


def test_a_removal_whose_turn_is_ended_goes_before_its_rename(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal sleeps while another writer looks at the file, and wakes up before that one's rename."""
    monkeypatch.setattr(store, "TURN_SECONDS", 0.0)
    file, other_writer = home / "manifest", of_other(home / "manifest")
    file.put_text("old")
    _, tag = read(file)
    rename_new, rename_over = rpc.rename_new, rpc.rename_over
    woke = list[bool]()

    def late(node: rpc.NameNode, source: str, target: str) -> bool:
        if not target.endswith("/gone"):
            return rename_new(node, source, target)

        def wake_first(client: rpc.NameNode, new: str, name: str) -> None:
            try:
                woke.append(rename_new(node, source, target))
            except FileNotFoundError:  # nothing was removed under the writer that had looked
                woke.append(False)
            rename_over(client, new, name)

        monkeypatch.setattr(rpc, "rename_new", rename_new)
        monkeypatch.setattr(rpc, "rename_over", wake_first)
        assert other_writer.put_if(b"theirs", tag)
        monkeypatch.setattr(rpc, "rename_over", rename_over)
        assert seen(other_writer) == "theirs"
        raise FileNotFoundError(target)

    monkeypatch.setattr(rpc, "rename_new", late)
    file.remove()
    assert woke == [False]
    assert seen(file) is None
    home.discard_unfinished()
    assert left_over(home) == []


@pytest.mark.parametrize("call", ["rename_new", "rename_over"])
def test_a_rename_is_done_and_not_answered(call: str, home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends it again, and is told that there is nothing to rename."""
    real = getattr(rpc, call)

    def twice(client: Any, source: str, target: str) -> Any:
        real(client, source, target)
        if rpc.status(client, source) is None:
            raise FileNotFoundError(source)

    monkeypatch.setattr(rpc, call, twice)
    assert (home / "a").put_if(b"1", None)
    assert (home / "a").put_if(b"2", read(home / "a")[1])
    (home / "b").put_text("b")
    assert (home / "a").read_bytes() == b"2"
    assert (home / "b").read_text() == "b"
    assert left_over(home) == []


def test_a_file_that_is_replaced_while_it_is_read(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and tag are of one write: with the new one's tag and the old one's bytes the new is lost."""
    (home / "a").put_text("old")
    real = rpc.read

    def overtaken(client: Any, path: str, start: int, size: int) -> bytes:
        got = real(client, path, start, size)
        monkeypatch.setattr(rpc, "read", real)
        of_other(home / "a").put_text("new")
        return got

    monkeypatch.setattr(rpc, "read", overtaken)
    text, tag = read(home / "a")
    assert (text, tag) == (b"new", read(home / "a")[1])


# --- deaths ----------------------------------------------------------------------------------------------------------


def replace_file(home: Location, text: str) -> None:
    thing = home / "thing"
    tagged = thing.read_tagged()
    if tagged is None or tagged[0] != text.encode():
        assert thing.put_if(text.encode(), None if tagged is None else tagged[1])


def publish_folder(home: Location, text: str) -> None:
    with (home / "thing").new_folder() as folder:
        (folder / f"only-{text}").put_text(text)


# Of the calls of a store of objects each is failed on a store in memory (test_storage_objects_faults.py); here it is
# what HDFS does for one.
@pytest.mark.parametrize(
    ("act", "how"),
    [*itertools.product([put_file, replace_file], ["fails", "is not answered", "killed"]), (publish_folder, "killed")],
)
def test_the_nth_call(
    act: Callable[[Location, str], None], how: str, home: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of HDFS, once each: a reader sees the old or the new, and a rerun makes the new and leaves nothing."""
    monkeypatch.setattr(store, "TURN_SECONDS", 0.0)
    cases = 0
    for old in (True,) if act is publish_folder else (False, True):
        for n in range(1, 300):
            place = home / f"{old}-{n}"
            if old:
                act(place, "old")
            previous = seen(of_other(place) / "thing")
            with faulty(n, how == "killed", rpc, done=how == "is not answered") as fault:
                try:
                    act(place, "new")
                    succeeded = True
                except (OSError, Killed):
                    succeeded = False
            visible = seen(of_other(place) / "thing")
            act(place, "new")
            new = seen(of_other(place) / "thing")
            assert visible in [previous, new], (old, n)
            assert new != previous
            if succeeded:
                assert visible == new
            place.discard_unfinished()
            assert left_over(place) == [], (old, n)
            cases += 1
            if fault.calls_made < n:
                break
        else:
            raise AssertionError("no end")
    assert cases > 8


@pytest.mark.parametrize("how", ["fails", "is not answered", "killed"])
def test_the_nth_call_of_a_removal(how: str, home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there whole or not at all, its neighbour stays, and the same removal again leaves nothing."""
    monkeypatch.setattr(store, "TURN_SECONDS", 0.0)
    for n in range(1, 300):
        place = home / str(n)
        for name in ("thing", "other"):
            (place / name).put_text(name)
        with faulty(n, how == "killed", rpc, done=how == "is not answered") as fault:
            try:
                (place / "thing").remove()
                succeeded = True
            except (OSError, Killed):
                succeeded = False
        assert seen(of_other(place) / "thing") in ([None] if succeeded else [None, "thing"]), n
        if fault.calls_made < n:
            assert left_over(place) == []
        (place / "thing").remove()
        assert seen(of_other(place) / "thing") is None
        assert seen(of_other(place) / "other") == "other"
        place.discard_unfinished()
        assert left_over(place) == [], n
        if fault.calls_made < n:
            break
    else:
        raise AssertionError("no end")
    assert n > 4


def test_what_is_removed_together(hdfs_server: Hdfs, home: Location) -> None:
    """Files, one that is gone, a folder that is empty; one that is not empty stays."""
    hdfs_bucket = HdfsBucket(hdfs_server.url.removeprefix("hdfs://"))
    folder = home.path.parts[-1]
    for name in ("a", "b", "full/c"):
        hdfs_bucket.put(f"{folder}/{name}", b"x")
    rpc.make_folder(hdfs_bucket._node, f"/{folder}/empty")
    hdfs_bucket.delete([f"{folder}/{name}" for name in ("a", "gone", "b", "empty", "full")])
    assert calls.list_level(hdfs_bucket, folder) == (["full"], [])
    assert [o.key for o in calls.list_below(hdfs_bucket, folder)] == [f"{folder}/full/c"]


def test_what_killed_writers_leave_is_told_and_goes(home: Location) -> None:
    for n in range(1, 20):
        with faulty(n, True, rpc), pytest.raises(Killed):
            (home / "a.json").put_text("x" * 100)
        if any(u.path == (home / "a.json").path for u in home.unfinished()):
            break
    (left,) = home.unfinished()
    assert (left.path, left.size) == ((home / "a.json").path, 100)
    assert left.modified_ns > 0
    assert home.entries() == []
    left.remove()
    assert home.unfinished() == []


# --- what else a store in memory cannot show -------------------------------------------------------------------------


def test_names_that_a_uri_would_write_otherwise(home: Location) -> None:
    names = ["ds=2026-01-01/a b%20c.json", "ds=2026-01-01/ä+#?&.txt", "x/[y]{z}*"]
    with (home / "p").new_folder() as folder:
        for name in names:
            (folder / name).put_text(name)
    assert {f.below(home / "p"): f.read_text() for f in (home / "p").files()} == {name: name for name in names}


def test_large_files_go_up_and_down_in_blocks(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK", 1 << 20)
    data = os.urandom((3 << 20) + 17)
    with (home / "large").new_file() as path:
        path.write_bytes(data)
    (home / "copy").copy_from(home / "large")
    assert (home / "copy").local_path().read_bytes() == data
    monkeypatch.setattr("headrace.storage.objects.store._SMALL", 1000)
    with (home / "copy").open() as f:
        f.seek(1 << 20)
        assert f.read(100) == data[1 << 20 :][:100]
    (home / "empty").put_bytes(b"")
    assert (home / "empty").read_bytes() == b""


def test_below_a_file_there_is_nothing(home: Location) -> None:
    (home / "a").put_text("1")
    assert not (home / "a" / "b").exists()
    assert (home / "a" / "b").entries() == []
    (home / "a" / "b").remove()
    with pytest.raises((StoreError, UserError)):
        (home / "a" / "b").put_text("2")
    assert (home / "a").read_text() == "1"


def test_a_removed_folder_takes_what_is_left_beside_its_files_along(home: Location, hdfs_server: Hdfs) -> None:
    put_folder(home / "x", "old")
    with faulty(2, True, rpc), pytest.raises(Killed):
        (home / "x" / "deep" / "b").put_text("killed")
    (home / "x").remove()
    assert not (home / "x").exists()
    hdfs_bucket = HdfsBucket(hdfs_server.url.removeprefix("hdfs://"))
    assert calls.list_level(hdfs_bucket, home.path.parts[-1]) == ([], [])


def test_one_holder_of_a_lease_and_commits_of_a_table(home: Location) -> None:
    """The workspace's own paths are leased and committed to."""
    ws = Workspace(Path("/nowhere"), lake_uri=f"hdfs:/{home.path}/lake", store_uri=f"hdfs:/{home.path}/store")
    table = ws.table("clicks", "events")
    assert str(table) == f"hdfs:/{home.path}/lake/lake/clicks/events"
    assert table.uri == str(table)
    with (ws.store / "locks" / "x").lease() as lease:
        with pytest.raises(Held, match=f"process {os.getpid()}"), of_other(ws.store / "locks" / "x").lease():
            pass
        lease.check()
        assert create_table(table, [{"name": "ds", "type": "string", "nullable": True, "metadata": {}}], ["ds"])
        add = {"path": f"{table}/ds=d1/1", "partitionValues": {"ds": "d1"}, "size": 9, "modificationTime": 1}
        assert Transaction(table, fence=lease.fence).replace("ds", ["d1"], [add | {"dataChange": True}], "") == 1

    def commit(n: int) -> bool:
        return (table / "_delta_log" / f"{2:020d}.json").put_new_text(f"{n}")

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(commit, range(8))) == 1
    assert [f.path for f in DeltaLog(table).files(1) or ()] == [table / "ds=d1" / "1"]


def test_a_name_that_no_file_of_settings_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setitem(location.STORES, "hdfs", HdfsStore())
    with pytest.raises(UserError, match=r"hdfs://cluster: there is no such NameNode .*HADOOP_CONF_DIR"):
        Location(PurePosixPath("/cluster/a"), "hdfs").exists()


def test_without_its_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.setitem(location.STORES, "hdfs", HdfsStore())
    with pytest.raises(UserError, match=r"hdfs-native is not installed: pip install headrace-hdfs"):
        Location(PurePosixPath("/127.0.0.1:1/a"), "hdfs").exists()


def test_a_folder_that_goes_while_its_files_are_listed() -> None:
    class Client:
        def list_status(self, path: str, recursive: bool) -> list[SimpleNamespace]:
            if recursive or path == "/a/gone":
                raise FileNotFoundError(path)
            children = {"/a": ["/a/gone", "/a/kept", "/a/x"], "/a/kept": ["/a/kept/y"]}[path]
            return [SimpleNamespace(path=p, isdir=p in ("/a/gone", "/a/kept")) for p in children]

    assert [s.path for s in rpc.below(rpc.NameNode("hdfs://host:1", Client()), "/a")] == ["/a/kept/y", "/a/x"]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            r'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=ann, '
            r'access=WRITE, inode=\"/\":root:x:drwxr-xr-x\n\tat org.apache.Server")',
            UserError,
            r"HDFS refuses hdfs://host:1/a: AccessControlException: Permission denied: user=ann, "
            r'.*"/":root:x:drwxr-xr-x\. The user',
        ),
        ('SASLError("no ticket")', UserError, "HDFS refuses hdfs://host:1/a: SASLError"),
        (
            r'RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot create file\n\tat x")',
            StoreAway,
            r"^hdfs://host:1/a: the NameNode is not ready \(SafeModeException: Cannot create file\)\. Run this again",
        ),
        (
            r'RPCError("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException", "The NameSpace quota is 1\n\tat x")',
            StoreError,
            r"^hdfs://host:1/a: NSQuotaExceededException: The NameSpace quota is 1$",
        ),
    ],
)
def test_what_hdfs_refuses(answer: str, error: type[Exception], message: str) -> None:
    class Client:
        def get_file_info(self, path: str) -> None:
            raise RuntimeError(answer)

    with pytest.raises(error, match=message) as raised:
        rpc.status(rpc.NameNode("hdfs://host:1", Client()), "/a")
    assert type(raised.value) is error
