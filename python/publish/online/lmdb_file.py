"""An LMDB file: a user's key -> its items, and a named database that says which version the file is.

The file is written beside and then takes the place of the one before in one step. Who has that one open reads on in it;
who opens the file anew (`lmdb.open(path, subdir=False, readonly=True, lock=False)`) reads the new one. Whether a later
run was first is looked at right before that step, not with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.publish.online.version import Version
from headrace.publish.opening import client_library
from headrace.publish.target import lease_lost, table_name
from headrace.publish.unfit_keys import KeyLimits
from headrace.stage import RunLock
from headrace.storage import Location, local
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The database of the version. Its name is an entry beside the users' keys, and no text in UTF-8: no user's key.
VERSION_DATABASE = b"\xffheadrace"
#: The only key in it.
VERSION_KEY = b"version"
#: Where earlier releases kept the version: an entry among the users' keys.
_OLD_VERSION_KEY = b"\0headrace"
#: Addresses set aside; the file is as large as what is in it.
_MAP_BYTES = 1 << 40
#: Users of a transaction.
_BATCH = 10_000


class LmdbStore:
    """One file; see `headrace.publish.online.store.OnlineStore`."""

    #: LMDB's own limit (MDB_MAXKEYSIZE).
    key_limits = KeyLimits(max_bytes=511, empty=False)

    def __init__(self, lmdb: Any, file: Location, lock: RunLock | None = None) -> None:
        self._lmdb, self._file, self._lock = lmdb, file, lock
        self.label = str(file)

    def current(self) -> Version | None:
        found = self._entry()
        return None if found is None else Version.from_json(found)

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
            found = reading.get(_OLD_VERSION_KEY)
            # There a user of that name took the record's place; his items are a list.
            is_record = found is not None and bytes(found).startswith(b"{")
            return _OLD_VERSION_KEY, bytes(found) if is_record else None
        return VERSION_DATABASE, bytes(reading.get(VERSION_KEY, db=database))

    def _check(self) -> None:
        """Raises LeaseLost where a later run has written the file, or is at work."""
        if self._lock is None:
            return
        fence, entry = self._lock.fence, self._entry()
        if entry is not None and json.loads(entry).get("fences", {}).get(fence.lease, 0) > fence.token:
            raise lease_lost(self.label)
        self._lock.check()

    def put(self, users: DataFrame, version: Version) -> None:
        with self._file.new_file() as path:
            with self._new(path) as env:
                writing = env.begin(write=True)
                fences = {self._lock.fence.lease: self._lock.fence.token} if self._lock else {}
                record = json.loads(version.to_json()) | ({"fences": fences} if fences else {})
                self._put_record(env, writing, json.dumps(record).encode())
                for i, row in enumerate(users.toLocalIterator(prefetchPartitions=True)):
                    writing.put(row["user"].encode(), row["items"].encode())
                    if i % _BATCH == _BATCH - 1:
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
            # A longer key than LMDB takes is in no file.
            known = (u.encode() for u in users if 0 < len(u.encode()) <= env.max_key_size())
            return sum(reading.get(key) is not None for key in known)

    def erase(self, users: Sequence[str]) -> None:
        gone, path, before = {u.encode() for u in users}, str(self._file.local_path()), self._entry()
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
                        if bytes(key) not in gone and bytes(key) != no_user:
                            writing.put(key, value)
                env.sync(True)
            self._check()
            if self._entry() != before:
                raise lease_lost(self.label)


@contextmanager
def open_lmdb(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[LmdbStore]:
    """See `headrace.publish.online.store.open_store`."""
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
