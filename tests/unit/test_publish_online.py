"""The stores of keys and values: a real Redis and LMDB files, filled from batches without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pytest
import redis

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.online import VERSION_DATABASE, VERSION_KEY, OnlineVersion, RedisStore, open_store
from headrace.storage import LeaseLost
from tests.publish_support import holding, redis_server

OLD, NEW = OnlineVersion("2026-01-09", "old"), OnlineVersion("2026-01-10", "new")


READER = """
import json, lmdb, sys
env = lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False)
print("open", flush=True)
sys.stdin.read()
with env.begin() as reading:
    print(json.dumps([json.loads(reading.get(b"u77")), reading.stat()["entries"]]))
"""


class Users:
    """A stand-in for Spark's frame of users, with the methods that stores call; each batch of rows is a partition."""

    def __init__(self, count: int, word: str) -> None:
        self.rows = [{"user": f"u{i}", "items": json.dumps([{"item": word, "score": i}])} for i in range(count)]

    def mapInArrow(self, send: Callable[[Iterable[Any]], Iterator[Any]], _: str) -> Users:
        parts = [self.rows[i::3] for i in range(3)]
        self.sent = [b for part in parts for b in send([pa.RecordBatch.from_pylist(part)])]
        return self

    def collect(self) -> list[dict[str, Any]]:
        return [row for batch in self.sent for row in batch.to_pylist()]

    def toLocalIterator(self, prefetchPartitions: bool) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.fixture(params=["redis", "lmdb"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    if request.param == "lmdb":
        yield ["publish.online.kind=lmdb"]
    else:
        with redis_server(tmp_path) as place:
            yield ["publish.online.kind=redis", f"publish.online.url=unix://{place}"]


class Killed(BaseException):
    """Stands for the end of the process."""


def test_versions_replace_each_other_whole(settings: list[str], tmp_path: Path) -> None:
    spec, ws = load_spec("clicks", settings), Workspace(tmp_path / "home")
    with open_store(spec, ws) as store:
        assert store.current() is None
        store.put(Users(2500, "old"), OLD)  # type: ignore[arg-type]
        assert store.current() == OLD
        if isinstance(store, RedisStore):
            read_redis(store, tmp_path)
        else:
            read_lmdb(store, ws)


def test_a_run_that_is_paused_while_it_writes_changes_nothing_after_a_later_one(
    settings: list[str], tmp_path: Path
) -> None:
    spec, ws = load_spec("clicks", settings), Workspace(tmp_path / "home")
    newer = OnlineVersion("2026-01-11", "newer")

    class Paused(Users):
        """Another run publishes while these are on their way."""

        def _pause(self) -> None:
            with open_store(spec, ws, holding(2)) as later_store:
                later_store.put(Users(30, "new"), NEW)  # type: ignore[arg-type]

        def mapInArrow(self, send: Callable[[Iterable[Any]], Iterator[Any]], kind: str) -> Users:
            super().mapInArrow(send, kind)
            self._pause()
            return self

        def toLocalIterator(self, prefetchPartitions: bool) -> Iterator[dict[str, Any]]:
            yield from self.rows
            self._pause()

    with open_store(spec, ws, holding(1)) as store:
        store.put(Users(20, "old"), OLD)  # type: ignore[arg-type]
        for users in (Paused(40, "older"), Users(40, "older")):
            with pytest.raises(LeaseLost, match="a later run of the pipeline has been at work there"):
                store.put(users, newer)  # type: ignore[arg-type]
            assert store.current() == NEW
        assert store.users_with([f"u{i}" for i in range(20, 40)]) == 10
    with open_store(spec, ws, holding(2)) as store:
        store.put(Users(9, "newer"), newer)  # type: ignore[arg-type]
        assert store.current() == newer


@pytest.mark.parametrize("erasure", ["claims", "erases"])
def test_a_run_that_is_paused_while_users_go_does_not_bring_them_back(tmp_path: Path, erasure: str) -> None:
    with redis_server(tmp_path) as place:
        settings = ["publish.online.kind=redis", f"publish.online.url=unix://{place}"]
        spec, ws = load_spec("clicks", settings), Workspace(tmp_path / "home")

        class Paused(Users):
            def mapInArrow(self, send: Callable[[Iterable[Any]], Iterator[Any]], kind: str) -> Users:
                with open_store(spec, ws, holding(2)) as later_store:
                    later_store.claim() if erasure == "claims" else later_store.erase(["u1"])
                return super().mapInArrow(send, kind)

        with open_store(spec, ws, holding(1)) as store:
            with pytest.raises(LeaseLost, match="a later run of the pipeline has been at work there"):
                store.put(Paused(9, "old"), OLD)  # type: ignore[arg-type]
            assert store.current() is None
            assert store.users_with([f"u{i}" for i in range(9)]) == 0
            with pytest.raises(LeaseLost):
                store.erase(["u1"])


def test_users_go_from_all_versions(settings: list[str], tmp_path: Path) -> None:
    spec, ws = load_spec("clicks", settings), Workspace(tmp_path / "home")
    with open_store(spec, ws) as store:
        assert store.users_with(["u1"]) == 0
        for version in (OLD, NEW):
            store.put(Users(9, version.key), version)  # type: ignore[arg-type]
        versions = 2 if isinstance(store, RedisStore) else 1
        removed_users = ["u1", "u8", "nobody", "u" * 600]
        assert store.users_with(removed_users) == 2 * versions
        store.erase(removed_users)
        assert store.users_with(removed_users) == 0
        assert store.users_with([f"u{i}" for i in range(9)]) == 7 * versions
        assert store.current() == NEW


def read_redis(store: RedisStore, folder: Path) -> None:
    with redis.Redis(unix_socket_path=str(folder / "redis.sock")) as client:

        def version() -> str:
            return str(json.loads(client.get("clicks_scores:current"))["version"])

        old = version()
        assert json.loads(client.get(f"clicks_scores:{old}:u77")) == [{"item": "old", "score": 77}]

        class Dying(Users):
            def mapInArrow(self, send: Callable[[Iterable[Any]], Iterator[Any]], _: str) -> Users:
                next(send([pa.RecordBatch.from_pylist(self.rows[:100])]))
                raise Killed

        with pytest.raises(Killed):
            store.put(Dying(2500, "new"), NEW)  # type: ignore[arg-type]
        assert (version(), store.current()) == (old, OLD)
        store.put(Users(1500, "new"), NEW)  # type: ignore[arg-type]
        new = version()
        assert store.current() == NEW
        assert json.loads(client.get(f"clicks_scores:{new}:u77")) == [{"item": "new", "score": 77}]
        assert client.get(f"clicks_scores:{old}:u77"), "a reader with the older pointer finds nothing"
        assert client.dbsize() == 2500 + 1500 + 2, "what the killed run wrote is still there"
        store.put(Users(10, "newer"), OnlineVersion("2026-01-11", "newer"))  # type: ignore[arg-type]
        assert client.dbsize() == 1500 + 10 + 2


def read_lmdb(store: Any, ws: Workspace) -> None:
    file = ws.home / "online" / "clicks_scores.lmdb"

    def opened(path: Path) -> Any:
        return lmdb.open(str(path), subdir=False, readonly=True, lock=False)

    class Dying(Users):
        def toLocalIterator(self, prefetchPartitions: bool) -> Iterator[dict[str, Any]]:
            yield from self.rows[:100]
            raise Killed

    # A process opens a file once: who has the older one open is another.
    with subprocess.Popen([sys.executable, "-c", READER, str(file)], stdin=-1, stdout=-1, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        with pytest.raises(Killed):
            store.put(Dying(2500, "new"), NEW)
        assert store.current() == OLD
        store.put(Users(12_000, "new"), NEW)
        assert store.current() == NEW
        reader.stdin.close()
        assert json.loads(reader.stdout.read()) == [[{"item": "old", "score": 77}], 2501]
    with opened(file) as after, after.begin() as reading:
        assert json.loads(reading.get(b"u77")) == [{"item": "new", "score": 77}]
        assert reading.stat()["entries"] == 12_001
    with lmdb.open(str(file), subdir=False, readonly=True, lock=False, max_dbs=1) as after:
        database = after.open_db(VERSION_DATABASE, create=False)
        with after.begin() as reading:
            assert OnlineVersion.from_json(bytes(reading.get(VERSION_KEY, db=database))) == NEW
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_users_named_like_the_version(tmp_path: Path) -> None:
    """A user's key never hides the version, be it of this release or of the one before."""
    spec = load_spec("clicks", ["publish.online.kind=lmdb", f"publish.online.path={tmp_path}/s.lmdb"])
    names = ["\0headrace", "headrace", "version", "ÿheadrace", "\0", "u" * 511]
    users = Users(len(names), "x")
    for row, name in zip(users.rows, names, strict=True):
        row["user"] = name
    with open_store(spec, Workspace(tmp_path)) as store:
        store.put(users, NEW)
        assert store.current() == NEW
        assert store.users_with([*names, "nobody", "u" * 512, ""]) == len(names)
        with lmdb.open(f"{tmp_path}/s.lmdb", subdir=False, readonly=True, lock=False) as env, env.begin() as reading:
            items = [json.loads(reading.get(name.encode())) for name in names]
        assert items == [[{"item": "x", "score": i}] for i in range(len(names))]
        store.erase(["\0headrace", "version"])
        assert store.current() == NEW
        assert store.users_with(names) == len(names) - 2


@pytest.mark.parametrize("user", [b"u1", b"\0headrace"])
def test_a_file_of_an_earlier_release(tmp_path: Path, user: bytes) -> None:
    """Its version is an entry among the users; where a user took its place, the day is exported again."""
    spec = load_spec("clicks", ["publish.online.kind=lmdb", f"publish.online.path={tmp_path}/s.lmdb"])
    with lmdb.open(f"{tmp_path}/s.lmdb", subdir=False, lock=False) as env, env.begin(write=True) as writing:
        writing.put(b"\0headrace", OLD.to_json().encode())
        writing.put(b"u2", b"[]")
        writing.put(user, b"[]")
    with open_store(spec, Workspace(tmp_path)) as store:
        assert store.current() == (OLD if user == b"u1" else None)
        store.erase(["u2"])
        assert store.users_with(["u1", "u2"]) == (1 if user == b"u1" else 0)
        assert store.current() == (OLD if user == b"u1" else None)
        store.put(Users(1, "new"), NEW)
        assert store.current() == NEW


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    spec = load_spec("clicks", ["publish.online.kind=redis", f"publish.online.url=unix://{tmp_path}/none"])
    with pytest.raises(UserError, match=r"publish\.online: unix://.*/none failed: .* Readers see what they saw before"):
        with open_store(spec, Workspace(tmp_path)) as store:
            store.current()
    with pytest.raises(UserError, match="kind redis needs the key 'url'"):
        load_spec("clicks", ["publish.online.kind=redis"])
    with pytest.raises(UserError, match="url has a password in it"):
        load_spec("clicks", ["publish.online.kind=redis", "publish.online.url=redis://:secret@h/0"])
