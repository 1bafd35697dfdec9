"""Redis: `TABLE:VERSION:USER` -> a user's items, and `TABLE:current` -> the version.

A reader gets `TABLE:current`, then the user's key of that version. The version before stays until the next is written,
so a reader that has just read the older pointer still finds its keys. `TABLE:lease:LEASE` is the token of the newest
holder of the pipeline's lease: what changes or removes what readers see is one transaction that watches it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.publish.online.version import Version
from headrace.publish.opening import client_library
from headrace.publish.passwords import password_of
from headrace.publish.target import lease_lost, table_name
from headrace.publish.unfit_keys import KeyLimits
from headrace.stage import RunLock
from headrace.storage import Fence, LeaseLost
from headrace.workspace import Workspace

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

#: Commands sent at once.
_BATCH = 1000


class RedisStore:
    """The keys of one table; see `headrace.publish.online.store.OnlineStore`."""

    #: Keys of 512 MB are longer than any id, and a prefix stands before the user's.
    key_limits = KeyLimits()

    def __init__(self, client: Any, url: str, password: str | None, table: str, fence: Fence | None = None) -> None:
        self._client, self._url, self._password, self._table, self._fence = client, url, password, table, fence
        self.label = f"{url} ({table}:*)"

    def current(self) -> Version | None:
        found = self._client.get(f"{self._table}:current")
        return None if found is None else Version.from_json(found)

    def put(self, users: DataFrame, version: Version) -> None:
        table, url, password, token = self._table, self._url, self._password, uuid.uuid4().hex[:12]
        known = f"{table}:versions"
        pointer = self._client.get(f"{table}:current")
        before = None if pointer is None else json.loads(pointer)["version"]
        for old in {name.decode() for name in self._client.smembers(known)} - {before}:
            self._drop(old)
        # Known before the first key is written: what a killed run leaves, the next one drops.
        self._change(lambda pipe: pipe.sadd(known, token))

        def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pyarrow
            import redis

            sent = 0
            with redis.Redis.from_url(url, password=password) as client:
                for batch in batches:
                    for part in (batch.slice(i, _BATCH) for i in range(0, batch.num_rows, _BATCH)):
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
            # The later run may have dropped this version already, and knows nothing of keys that came afterwards.
            for some in self._keys(token):
                self._client.unlink(*some)
            raise

    def claim(self) -> None:
        self._change(lambda pipe: None)

    def users_with(self, users: Sequence[str]) -> int:
        return sum(int(n) for n in self._of_versions(users, "exists"))

    def erase(self, users: Sequence[str]) -> None:
        # A version that is being written now has them too, and does not become current afterwards.
        self.claim()
        self._of_versions(users, "unlink")

    def _of_versions(self, users: Sequence[str], command: str) -> list[int]:
        """A command for the key of each user in each version; its answers."""
        found: list[int] = []
        for token in sorted(name.decode() for name in self._client.smembers(f"{self._table}:versions")):
            for start in range(0, len(users), _BATCH):
                pipe = self._client.pipeline(transaction=False)
                for user in users[start : start + _BATCH]:
                    getattr(pipe, command)(f"{self._table}:{token}:{user}")
                found += pipe.execute()
        return found

    def _drop(self, token: str) -> None:
        for some in self._keys(token):
            self._change(methodcaller("unlink", *some))
        self._change(lambda pipe: pipe.srem(f"{self._table}:versions", token))

    def _keys(self, token: str) -> Iterator[list[bytes]]:
        """A version's keys, some at a time."""
        keys = self._client.scan_iter(f"{self._table}:{token}:*", count=_BATCH)
        while some := list(islice(keys, _BATCH)):
            yield some

    def _change(self, add: Callable[[Any], object]) -> None:
        """All commands that `add` gives a pipeline, or none: LeaseLost where a later holder of the lease was here."""
        fence, key = self._fence, f"{self._table}:lease:{self._fence.lease if self._fence else ''}"

        def queue(pipe: Any) -> None:
            found = pipe.get(key)
            if fence is not None and found is not None and int(found) > fence.token:
                raise lease_lost(self.label)
            pipe.multi()
            if fence is not None:
                pipe.set(key, fence.token)
            add(pipe)

        # Begins anew where the key was changed since it was read.
        self._client.transaction(queue, key)


@contextmanager
def open_redis(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[RedisStore]:
    """See `headrace.publish.online.store.open_store`."""
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
