"""Stores of keys and values, which serve a user's items as JSON, best first: Redis and LMDB.

**Redis.** `TABLE:VERSION:USER` holds a user's items, and `TABLE:current` the version. A reader gets `TABLE:current`,
then the user's key of that version. The previous version stays until the next one is written, so a reader of the older
pointer still finds its keys. `TABLE:lease:LEASE` is the token of the newest holder of the pipeline's lease. Whatever
changes or removes what readers see is one transaction that watches it.

**LMDB.** A file maps a user's key to its items, and a named database in it holds the version. A new file takes the
place of the previous one in one step. A process that has the old file open reads on in it. A process that opens the
file anew (`lmdb.open(path, subdir=False, readonly=True, lock=False)`) reads the new one. Right before that step, not
within it, the lease is checked.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.config import Spec
from headrace.config.schema import column
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.opening import client_library, password_of
from headrace.publish.target import KeyLimits, LeftOut, lease_lost, table_name, without_unfit_keys
from headrace.stage import RunLock
from headrace.storage import Fence, LeaseLost, Location, local

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class OnlineVersion:
    """A day's scores by one run."""

    ds: str
    #: Key of the run.
    key: str

    def to_json(self) -> str:
        """Return the version as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> OnlineVersion:
        """Return the version in the text of `to_json`; other keys are ignored."""
        record = json.loads(text)
        return OnlineVersion(record["ds"], record["key"])


#: LMDB's database of the version. LMDB keeps its name beside the users' keys: no text in UTF-8 can be equal to it.
VERSION_DATABASE = b"\xffheadrace"
#: The only key in it.
VERSION_KEY = b"version"
#: Where earlier releases kept the version: an entry among the users' keys.
_OLD_VERSION_KEY = b"\0headrace"
#: Reserved address space, in bytes; the file grows with its content.
_MAP_BYTES = 1 << 40
#: Users per transaction.
_LMDB_BATCH = 10_000


class LmdbStore:
    """One file; see `headrace.publish.online.OnlineStore`."""

    #: LMDB's own limit (MDB_MAXKEYSIZE).
    key_limits = KeyLimits(max_bytes=511, empty=False)

    def __init__(self, lmdb: Any, file: Location, lock: RunLock | None = None) -> None:
        self._lmdb, self._file, self._lock = lmdb, file, lock
        self.label = str(file)

    def current(self) -> OnlineVersion | None:
        entry = self._entry()
        return None if entry is None else OnlineVersion.from_json(entry)

    def _entry(self) -> bytes | None:
        """Return the record of the version that the file is by now; None where there is no file, or no record."""
        if not self._file.is_file():
            return None
        path = str(self._file.local_path())
        with self._lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=1) as env, env.begin() as reading:
            return self._record(env, reading)[1]

    def _record(self, env: Any, reading: Any) -> tuple[bytes, bytes | None]:
        """Return the entry among the users' keys that is no user's, and the record of the version, if there is one."""
        try:
            database = env.open_db(VERSION_DATABASE, txn=reading, create=False)
        except self._lmdb.NotFoundError:
            old_record = reading.get(_OLD_VERSION_KEY)
            # A user of that name may have taken the record's place: a list of items, where the record is an object.
            is_record = old_record is not None and bytes(old_record).startswith(b"{")
            return _OLD_VERSION_KEY, bytes(old_record) if is_record else None
        return VERSION_DATABASE, bytes(reading.get(VERSION_KEY, db=database))

    def _check(self) -> None:
        """Raise LeaseLost where a later run has written the file, or is at work."""
        if self._lock is None:
            return
        fence, entry = self._lock.fence, self._entry()
        if entry is not None and json.loads(entry).get("fences", {}).get(fence.lease, 0) > fence.token:
            raise lease_lost(self.label)
        self._lock.check()

    def put(self, users: DataFrame, version: OnlineVersion) -> None:
        with self._file.new_file() as path:
            with self._new(path) as env:
                writing = env.begin(write=True)
                fences = {self._lock.fence.lease: self._lock.fence.token} if self._lock else {}
                record = json.loads(version.to_json()) | ({"fences": fences} if fences else {})
                self._put_record(env, writing, json.dumps(record).encode())
                for i, row in enumerate(users.toLocalIterator(prefetchPartitions=True)):
                    writing.put(row["user"].encode(), row["items"].encode())
                    if i % _LMDB_BATCH == _LMDB_BATCH - 1:
                        writing.commit()
                        writing = env.begin(write=True)
                writing.commit()
                env.sync(True)
            self._check()

    def _new(self, path: Path) -> Any:
        """Open a file that is being written."""
        return self._lmdb.open(str(path), subdir=False, lock=False, map_size=_MAP_BYTES, sync=False, max_dbs=1)

    @staticmethod
    def _put_record(env: Any, writing: Any, record: bytes) -> None:
        writing.put(VERSION_KEY, record, db=env.open_db(VERSION_DATABASE, txn=writing))

    def claim(self) -> None:
        """Nothing: what takes the place of the file looks for the lease right before."""

    def users_with(self, users: Sequence[str]) -> int:
        if not self._file.is_file():
            return 0
        path = str(self._file.local_path())
        with self._lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as reading:
            # LMDB refuses look-ups of keys that are longer than it stores.
            known = (u.encode() for u in users if 0 < len(u.encode()) <= env.max_key_size())
            return sum(reading.get(key) is not None for key in known)

    def erase(self, users: Sequence[str]) -> None:
        erased_keys, path, previous_entry = {u.encode() for u in users}, str(self._file.local_path()), self._entry()
        with self._file.new_file() as new:
            with (
                self._lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=1) as old,
                self._new(new) as env,
            ):
                with old.begin() as reading, env.begin(write=True) as writing:
                    no_user, record = self._record(old, reading)
                    if record is not None:
                        self._put_record(env, writing, record)
                    for key, value in reading.cursor():
                        if bytes(key) not in erased_keys and bytes(key) != no_user:
                            writing.put(key, value)
                env.sync(True)
            self._check()
            if self._entry() != previous_entry:
                raise lease_lost(self.label)


@contextmanager
def open_lmdb(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[LmdbStore]:
    """See `headrace.publish.online.open_store`."""
    with client_library("lmdb", "publish.online"):
        import lmdb
    assert spec.publish is not None
    assert spec.publish.online is not None
    path = spec.publish.online.path
    file = local(path) if path else ws.store / "online" / f"{table_name(spec)}.lmdb"
    try:
        yield LmdbStore(lmdb, file, lock)
    except lmdb.Error as e:
        raise UserError(f"publish.online: {file}: {e}. Readers see what they saw before") from None


#: Commands per round trip.
_REDIS_BATCH = 1000


class RedisStore:
    """The keys of one table; see `headrace.publish.online.OnlineStore`."""

    #: Keys of 512 MB are longer than any id, and a prefix stands before the user's.
    key_limits = KeyLimits()

    def __init__(self, client: Any, url: str, password: str | None, table: str, fence: Fence | None = None) -> None:
        self._client, self._url, self._password, self._table, self._fence = client, url, password, table, fence
        self.label = f"{url} ({table}:*)"

    def current(self) -> OnlineVersion | None:
        pointer = self._client.get(f"{self._table}:current")
        return None if pointer is None else OnlineVersion.from_json(pointer)

    def put(self, users: DataFrame, version: OnlineVersion) -> None:
        table, url, password, token = self._table, self._url, self._password, uuid.uuid4().hex[:12]
        known = f"{table}:versions"
        pointer = self._client.get(f"{table}:current")
        previous_token = None if pointer is None else json.loads(pointer)["version"]
        for old in {name.decode() for name in self._client.smembers(known)} - {previous_token}:
            self._drop(old)
        # The version is listed before its first key is written, so that the next run drops what a killed one leaves.
        self._change(lambda pipe: pipe.sadd(known, token))

        def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pyarrow
            import redis

            sent = 0
            with redis.Redis.from_url(url, password=password) as client:
                for batch in batches:
                    for part in (batch.slice(i, _REDIS_BATCH) for i in range(0, batch.num_rows, _REDIS_BATCH)):
                        pipe = client.pipeline(transaction=False)
                        for user, items in zip(*(c.to_pylist() for c in part.columns), strict=True):
                            pipe.set(f"{table}:{token}:{user}", items)
                        sent += sum(bool(done) for done in pipe.execute())
            yield pyarrow.RecordBatch.from_pydict({"users": [sent]})

        sent = sum(row["users"] for row in users.mapInArrow(send, "users bigint").collect())
        now = json.dumps(asdict(version) | {"version": token, "users": sent})
        try:
            self._change(lambda pipe: pipe.set(f"{table}:current", now))
        except LeaseLost:
            # The later run may have dropped this version before the last keys were written.
            for some in self._keys(token):
                self._client.unlink(*some)
            raise

    def claim(self) -> None:
        self._change(lambda pipe: None)

    def users_with(self, users: Sequence[str]) -> int:
        return sum(int(n) for n in self._of_versions(users, "exists"))

    def erase(self, users: Sequence[str]) -> None:
        # A version that another run is writing has them too: the claim keeps it from becoming current.
        self.claim()
        self._of_versions(users, "unlink")

    def _of_versions(self, users: Sequence[str], command: str) -> list[int]:
        """Run a command for the key of each user in each version; return its answers."""
        answers: list[int] = []
        for token in sorted(name.decode() for name in self._client.smembers(f"{self._table}:versions")):
            for start in range(0, len(users), _REDIS_BATCH):
                pipe = self._client.pipeline(transaction=False)
                for user in users[start : start + _REDIS_BATCH]:
                    getattr(pipe, command)(f"{self._table}:{token}:{user}")
                answers += pipe.execute()
        return answers

    def _drop(self, token: str) -> None:
        for some in self._keys(token):
            self._change(methodcaller("unlink", *some))
        self._change(lambda pipe: pipe.srem(f"{self._table}:versions", token))

    def _keys(self, token: str) -> Iterator[list[bytes]]:
        """Yield a version's keys, some at a time."""
        keys = self._client.scan_iter(f"{self._table}:{token}:*", count=_REDIS_BATCH)
        while some := list(islice(keys, _REDIS_BATCH)):
            yield some

    def _change(self, add: Callable[[Any], object]) -> None:
        """All commands that `add` gives a pipeline, or none: LeaseLost where a later holder of the lease was here."""
        fence, key = self._fence, f"{self._table}:lease:{self._fence.lease if self._fence else ''}"

        def queue(pipe: Any) -> None:
            newest_token = pipe.get(key)
            if fence is not None and newest_token is not None and int(newest_token) > fence.token:
                raise lease_lost(self.label)
            pipe.multi()
            if fence is not None:
                pipe.set(key, fence.token)
            add(pipe)

        # Redis runs it again where the watched key has changed since it was read.
        self._client.transaction(queue, key)


@contextmanager
def open_redis(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[RedisStore]:
    """See `headrace.publish.online.open_store`."""
    with client_library("redis", "publish.online"):
        import redis
    assert spec.publish is not None
    conf = spec.publish.online
    assert conf is not None
    assert conf.url is not None, "config refuses the kind without it"
    password = password_of(conf, "publish.online")
    try:
        with redis.Redis.from_url(conf.url, password=password) as client:
            yield RedisStore(client, conf.url, password, table_name(spec), lock.fence if lock else None)
    except (redis.RedisError, ValueError) as e:
        raise UserError(
            f"publish.online: {conf.url} failed: {str(e).splitlines()[0]}. Readers see what they saw before; run the "
            f"same command again once that is mended"
        ) from None


class OnlineStore(Protocol):
    """An open store. A reader who asks by the version that is current sees that version whole."""

    #: Name of the store in messages.
    label: str
    #: Limits of users' keys.
    key_limits: KeyLimits

    def current(self) -> OnlineVersion | None:
        """Return the version that readers see; None where there is none."""
        ...

    def put(self, users: DataFrame, version: OnlineVersion) -> None:
        """Write the items of all users (columns `user` and `items`, text), then make them current in one step."""
        ...

    def claim(self) -> None:
        """Have versions of earlier runs that stand still refused from now on, as far as the store can.

        Raises:
            LeaseLost: a later run has been at work there.
        """
        ...

    def users_with(self, users: Sequence[str]) -> int:
        """Count these users in all versions."""
        ...

    def erase(self, users: Sequence[str]) -> None:
        """Remove these users from all versions."""
        ...


_OPEN: dict[str, Callable[[Spec, Workspace, RunLock | None], AbstractContextManager[OnlineStore]]] = {
    "redis": open_redis,
    "lmdb": open_lmdb,
}


def open_store(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> AbstractContextManager[OnlineStore]:
    """Return the store of a pipeline that has one, for a `with` block.

    Args:
        spec: the pipeline.
        ws: the workspace.
        lock: that this process is at work on the pipeline; None: the block changes nothing.

    Raises:
        UserError: it cannot be reached, its library is not installed, or it fails in the block.
    """
    assert spec.publish is not None
    assert spec.publish.online is not None, "asked for pipelines that name a store"
    return _OPEN[spec.publish.online.kind](spec, ws, lock)


def items_by_user(df: DataFrame, user: str, item: str) -> DataFrame:
    """One row a user: its key as text, and `[{"item": ..., "score": ...}, ...]` in order of ranks.

    Args:
        df: the day's scores.
        user: name of the user key.
        item: name of the item key.
    """
    from pyspark.sql import functions as F

    user_key, item_key = column(user), column(item)
    ranked = F.sort_array(F.collect_list(F.struct("rank", item_key.alias("item"), "score")))
    items = F.to_json(F.transform(ranked, lambda r: F.struct(r["item"].alias("item"), r["score"].alias("score"))))
    return df.groupBy(user_key.cast("string").alias("user")).agg(items.alias("items"))


def export(store: OnlineStore, df: DataFrame, user: str, item: str, version: OnlineVersion) -> LeftOut:
    """Make the day's scores what readers of the store see, unless they are already.

    Returns:
        what the store cannot hold, and is not in it.
    """
    fit, left_out = without_unfit_keys(df, {user: store.key_limits}, user)
    if store.current() != version:
        store.put(items_by_user(fit, user, item), version)
    return left_out
