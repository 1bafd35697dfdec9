"""The store in HDFS: the calls of a store of objects by those of HDFS. A key is a path without its first slash.

The tag of a file is the time of its last write (in ms, by the NameNode's clock) and its size: a listing tells both, of
what Spark writes, too. A file keeps them when it is renamed.

**A file is replaced on a condition** (`put_if`) by whoever has the *turn* at its name: the folder `.NAME.lock`, in
which is one file, named by a token that nobody else ever uses, with the new content. The folder is made elsewhere and
gets its name by a rename that replaces nothing, so one writer has it. That writer looks whether the file still has the
tag, and renames

    .NAME.lock/TOKEN  to  NAME

which is the one step by which the file changes. It succeeds only where the source is there, and the source is there
only while this very writer's turn lasts, from before its look. Who ends a turn removes the folder with the source in
it, in one step. So no clock and no lease has to be right for it to hold: a turn may be ended too early, and then its
writer, asleep between its look and its rename, finds no source, looks again and tells what it finds.

- A writer that dies before its turn leaves `.NAME.TOKEN.partial`, which nobody minds; in its turn, a lock that others
  end when they have waited for it for TURN_SECONDS by their own clocks (a turn takes milliseconds); after its
  rename, an empty lock, which anybody removes at once.
- The new file's time is made later than the old one's where the clock does not see to it: no tag comes twice.
  `put` does so, too; of two that put at once, of the same size and in the same millisecond, both have the same tag.
- `put_new` looks that there is no file, ends a turn that there may be, and only then renames, which fails where there
  is one now. So who had looked at a file that has been removed since cannot replace the one after it.
- Files that may be replaced so are removed in a turn, too: by a rename into a folder of the lock.
- `put`, which replaces whatever is there, asks for no turn: nobody puts with and without condition at one key.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from headrace.errors import UserError
from headrace.errors.stores import StoreError
from headrace.storage.objects import calls
from headrace.storage.objects.calls import Bucket, Stored
from headrace.storage.objects.store import ObjectStore
from headrace.storage.objects.tree import (
    DATA,
    HIDDEN,
    LISTS,
    LOCK,
    PARTIAL,
    BucketTree,
    data_prefix,
    final_name,
    is_unfinished,
)
from headrace.storage.store import Unfinished
from headrace_hdfs import rpc
from headrace_hdfs.rpc import NameNode, TimedClient


def connect(authority: str) -> NameNode:
    """Return a connection to the NameNode at `HOST:PORT`, or to those of a name in hdfs-site.xml; ask it nothing yet.

    Who asks is found as Hadoop's own tools find it, in each process. Without security it is HADOOP_USER_NAME, or the
    user of the process. Where core-site.xml in HADOOP_CONF_DIR says `hadoop.security.authentication` is kerberos, it is
    the ticket of `kinit` (KRB5CCNAME), by the library libgssapi_krb5 of the machine, or a delegation token of
    HADOOP_TOKEN_FILE_LOCATION. Names of several NameNodes at once (`hdfs://cluster`) are those of hdfs-site.xml there.

    Raises:
        UserError: the package is not installed, or the name is not known, of a host neither.
    """
    try:
        # 17 MB of native code, which no other store needs.
        from hdfs_native import Client
    except ImportError:
        raise UserError(
            f"hdfs://{authority}: the package hdfs-native is not installed: pip install headrace-hdfs"
        ) from None

    try:
        _look_up(authority)
        return NameNode(f"hdfs://{authority}", TimedClient(Client(f"hdfs://{authority}"), authority))
    except (OSError, RuntimeError, ValueError) as e:
        raise UserError(
            f"hdfs://{authority}: there is no such NameNode ({e}): write hdfs://HOST:PORT/FOLDER, or a name that "
            f"hdfs-site.xml in HADOOP_CONF_DIR has"
        ) from None


def _look_up(authority: str) -> None:
    """Look up a host.

    Raises OSError where there is none of that name: to the client that is a connection which fails.
    """
    url = urlsplit(f"hdfs://{authority}")
    if url.port is None:  # a name of hdfs-site.xml
        return
    try:
        socket.getaddrinfo(url.hostname, url.port)
    except socket.gaierror as e:
        # A server of names that does not answer is no reason to take the name for a wrong one.
        if e.errno != socket.EAI_AGAIN:
            raise


T = TypeVar("T")

#: Seconds for which a writer waits for another one's turn to end, before it ends it; a test's may be shorter.
TURN_SECONDS = 5.0
_POLL_SECONDS = 0.01
#: Bytes of a file that are in memory at a time while it goes up.
_BLOCK = 8 << 20
#: Where a rename finds no source it was not done before, its answer lost.
_REMOVED_BY_OTHERS = "what was to become this file was removed by somebody else"


class HdfsBucket(Bucket):
    """All of one HDFS; see the module and `headrace.storage.objects.calls`."""

    def __init__(self, authority: str) -> None:
        self._authority = authority

    def display_name(self, key: str) -> str:
        """Return the name of a file in messages."""
        return f"hdfs://{self._authority}{_path(key)}"

    @cached_property
    def _node(self) -> NameNode:
        """The connection. Of no use to a child that is forked afterwards: the library's threads are the parent's."""
        return connect(self._authority)

    def get_small(self, key: str, limit: int | None) -> tuple[bytes | None, Stored] | None:
        """Return the bytes of a file, and its tag; both are of one write."""

        def bytes_of(stored: Stored) -> bytes | None:
            if limit is not None and stored.size > limit:
                return None
            return rpc.read(self._node, _path(key), 0, stored.size)

        return self._of_one_write(key, bytes_of)

    def get_range(self, key: str, start: int, size: int) -> bytes:
        return rpc.read(self._node, _path(key), start, size)

    def head(self, key: str) -> Stored | None:
        status = rpc.status(self._node, _path(key))
        return None if status is None or status.isdir else _stored(key, status)

    def put(self, key: str, data: bytes) -> str:
        return self._put(key, [data])

    def upload(self, key: str, file: Path) -> None:
        self._put(key, _blocks(file))

    def put_new(self, key: str, data: bytes) -> str | None:
        if self.head(key) is not None:
            return None
        partial, written = self._written(key, [data])
        tag = written.tag
        try:
            rpc.delete_tree(self._node, _path(_lock(key)))
            try:
                if rpc.rename_new(self._node, _path(partial), _path(key)):
                    return tag
            except FileNotFoundError:
                existing = self.get_small(key, None)
                if existing is None or existing[0] != data:
                    raise StoreError(f"{self.display_name(key)}: {_REMOVED_BY_OTHERS}") from None
                return tag
        except BaseException:
            self._clear(partial)
            raise
        rpc.delete_tree(self._node, _path(partial))
        return None

    def put_if(self, key: str, data: bytes, revision: str) -> str | None:
        """See the module. Where others end its turn it looks again."""
        while True:
            token = uuid.uuid4().hex
            folder = _partial(key, token)
            try:
                rpc.create(self._node, _path(f"{folder}/{token}"), [data])
                self._take_turn(key, folder, token)
                now = self.head(key)
                if now is None or now.revision != revision:
                    self._end_turn(key, token)
                    return None
                tag = self._later_than(now, self._required(f"{_lock(key)}/{token}"))
                with suppress(FileNotFoundError):  # the turn was ended, or this was done and not answered
                    rpc.rename_over(self._node, _path(f"{_lock(key)}/{token}"), _path(key))
                    rpc.delete(self._node, _path(_lock(key)))
                    return tag
            except FileNotFoundError:  # the turn was ended before the look at its own file
                continue
            except BaseException:
                self._clear(folder)
                with suppress(OSError, UserError):
                    self._end_turn(key, token)
                raise
            existing = self.get_small(key, None)
            if existing is not None and existing[0] == data:
                return existing[1].tag

    def download(self, key: str, file: Path) -> Stored:
        download = self._of_one_write(key, lambda s: rpc.read_to(self._node, _path(key), file, s.size))
        if download is None:
            raise FileNotFoundError(f"there is no file {self.display_name(key)}")
        return download[1]

    def copy(self, source: str, target: str) -> None:
        """Copy a file through this process: HDFS has no call for it."""
        stored = self.head(source)
        if stored is None:
            raise FileNotFoundError(f"there is no file {self.display_name(source)}")
        size = stored.size
        starts = range(0, size, _BLOCK)
        self._put(target, (rpc.read(self._node, _path(source), start, min(_BLOCK, size - start)) for start in starts))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files, and the folders of the store's own that are empty then."""
        for key in keys:
            if f"/{DATA}/" in f"/{key}":
                rpc.delete(self._node, _path(key))
            else:
                self._delete_in_turn(key)
        for folder in sorted({key.rpartition("/")[0] for key in keys}, reverse=True):
            self._prune(folder)

    def list_below(self, prefix: str) -> list[Stored]:
        stored = (_stored(_key(s), s) for s in rpc.below(self._node, _path(prefix)))
        return sorted((s for s in stored if s.key != prefix), key=lambda s: s.key)

    def list_level(self, prefix: str, after: str = "") -> tuple[list[str], list[Stored]]:
        statuses = [s for s in rpc.level(self._node, _path(prefix)) if _key(s) != prefix]
        folders = sorted(_key(s).rpartition("/")[2] for s in statuses if s.isdir)
        return folders, sorted((_stored(_key(s), s) for s in statuses if not s.isdir), key=lambda s: s.key)

    def remove_folder(self, key: str) -> None:
        """Remove a folder and all below it, whatever it is; a file stays."""
        status = rpc.status(self._node, _path(key))
        if status is not None and status.isdir:
            rpc.delete_tree(self._node, _path(key))

    def remove_partial(self, key: str) -> None:
        """Remove what a writer left beside a file, or its turn."""
        rpc.delete_tree(self._node, _path(key))

    def _of_one_write(self, key: str, read: Callable[[Stored], T]) -> tuple[T, Stored] | None:
        """Return what `read` gives of a file, and its tag; read again where it was replaced meanwhile."""
        previous = self.head(key)
        while previous is not None:
            fault: Exception | None = None
            try:
                got = read(previous)
            except (FileNotFoundError, StoreError) as e:  # its blocks may have gone with it
                fault = e
            current = self.head(key)
            if current == previous:
                if fault is not None:
                    raise fault
                return got, previous
            previous = current
        return None

    def _put(self, key: str, blocks: Iterable[bytes]) -> str:
        partial, written = self._written(key, blocks)
        tag = written.tag
        try:
            if (replaced := self.head(key)) is not None:
                tag = self._later_than(replaced, written)
            rpc.rename_over(self._node, _path(partial), _path(key))
        except FileNotFoundError:
            current = self.head(key)
            if current is None or current.tag != tag:
                raise StoreError(f"{self.display_name(key)}: {_REMOVED_BY_OTHERS}") from None
        except BaseException:
            self._clear(partial)
            raise
        return tag

    def _written(self, key: str, blocks: Iterable[bytes]) -> tuple[str, Stored]:
        """Write a file beside that of a key; return its key, and what the NameNode knows of it."""
        partial = _partial(key, uuid.uuid4().hex[:8])
        try:
            rpc.create(self._node, _path(partial), blocks)
            stored = self.head(partial)
            if stored is None:
                raise StoreError(f"{self.display_name(partial)} is gone since it was written")
        except BaseException:
            self._clear(partial)
            raise
        return partial, stored

    def _take_turn(self, key: str, folder: str, token: str) -> None:
        """Have the folder be the lock. Raises FileNotFoundError where somebody removed it."""
        lock = _lock(key)
        seen, since = "", 0.0
        while True:
            try:
                if rpc.rename_new(self._node, _path(folder), _path(lock)):
                    return
            except FileNotFoundError:
                # It may have been done and not answered.
                if rpc.status(self._node, _path(f"{lock}/{token}")) is not None:
                    return
                raise
            held = next((_key(s) for s in rpc.level(self._node, _path(lock))), "")
            if not held:
                rpc.delete(self._node, _path(lock))
                continue
            if held != seen:
                seen, since = held, time.monotonic()
            elif time.monotonic() - since > TURN_SECONDS:
                rpc.delete_tree(self._node, _path(lock))
                continue
            time.sleep(_POLL_SECONDS)

    def _end_turn(self, key: str, token: str) -> None:
        """End the turn of the token, and no other: without the token the turn is over, or another writer's."""
        rpc.delete_tree(self._node, _path(f"{_lock(key)}/{token}"))
        rpc.delete(self._node, _path(_lock(key)))

    def _delete_in_turn(self, key: str) -> None:
        """Remove a file, or a folder that is empty: of who had looked at it before, none can replace it any more."""
        while (status := rpc.status(self._node, _path(key))) is not None:
            if status.isdir:
                rpc.delete(self._node, _path(key))
                return
            token = uuid.uuid4().hex
            folder = _partial(key, token)
            try:
                rpc.make_folder(self._node, _path(f"{folder}/{token}"))
                with suppress(FileNotFoundError):  # the turn was ended, or somebody else has removed the file
                    self._take_turn(key, folder, token)
                    # Its target's folder is there only while the turn lasts.
                    rpc.rename_new(self._node, _path(key), _path(f"{_lock(key)}/{token}/gone"))
            except BaseException:
                self._clear(folder)
                with suppress(OSError, UserError):
                    self._end_turn(key, token)
                raise
            self._end_turn(key, token)

    def _later_than(self, old: Stored, new: Stored) -> str:
        """Return the tag of a file after making its time later than that of `old`. Raises FileNotFoundError."""
        if new.modified_ns > old.modified_ns:
            return new.tag
        rpc.set_modified(self._node, _path(new.key), old.modified_ns // 1_000_000 + 1)
        return self._required(new.key).tag

    def _required(self, key: str) -> Stored:
        """Return what the NameNode knows of a file. Raises FileNotFoundError."""
        stored = self.head(key)
        if stored is None:
            raise FileNotFoundError(self.display_name(key))
        return stored

    def _prune(self, folder: str) -> None:
        """Remove a folder of the store's own, and those above it that are its own, while they are empty."""
        while HIDDEN in folder.split("/") and rpc.delete(self._node, _path(folder)):
            folder = folder.rpartition("/")[0]

    def _clear(self, key: str) -> None:
        """Remove what nobody reads. What cannot be removed now goes with `discard_unfinished`."""
        with suppress(OSError, UserError):
            rpc.delete_tree(self._node, _path(key))


def _path(key: str) -> str:
    return f"/{key}"


def _key(status: Any) -> str:
    return str(status.path).lstrip("/")


def _stored(key: str, status: Any) -> Stored:
    time_ms, size = int(status.modification_time), int(status.length)
    return Stored(key, size, time_ms * 1_000_000, f"{time_ms}-{size}")


def _sibling(key: str, name: Callable[[str], str]) -> str:
    above, slash, base = key.rpartition("/")
    return f"{above}{slash}{name(base)}"


def _partial(key: str, token: str) -> str:
    return _sibling(key, lambda name: f".{name}.{token}{PARTIAL}")


def _lock(key: str) -> str:
    return _sibling(key, lambda name: f".{name}{LOCK}")


def _blocks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as f:
        while block := f.read(_BLOCK):
            yield block


class HdfsStore(ObjectStore):
    """One or several HDFS; see the package and `Store`.

    A path is /AUTHORITY/PATH, with the authority of the URI: NAMENODE:PORT, or a name of hdfs-site.xml.
    """

    def __init__(self) -> None:
        super().__init__("hdfs", lambda scheme, authority: HdfsBucket(authority))

    def remove(self, path: PurePosixPath) -> None:
        """See Store. Folders, and what killed writers left, go with the files."""
        tree, key = self._resolve(path)
        owner = tree.owner(key)
        super().remove(path)
        if owner is None and key:
            for place in (key, data_prefix(key)):
                _bucket(tree).remove_folder(place)
            tree.forget(key)

    def unfinished(self, path: PurePosixPath) -> list[Unfinished]:
        """See Store."""
        tree, key = self._resolve(path)
        entries = super().unfinished(path)
        for folder, ending in ((key, ""), (f"{key}/{LISTS}".lstrip("/"), ".json")):
            folders, objects = calls.list_level(tree.bucket, folder)
            names = {*folders, *(o.key.rpartition("/")[2] for o in objects)}
            for name in sorted(n for n in names if is_unfinished(n)):
                left = _left(tree, f"{folder}/{name}".lstrip("/"), objects)
                entries.append(
                    Unfinished(
                        path / final_name(name).removesuffix(ending),
                        sum(o.size for o in left),
                        max((o.modified_ns for o in left), default=0),
                        partial(_bucket(tree).remove_partial, f"{folder}/{name}".lstrip("/")),
                    )
                )
        return entries


def _left(tree: BucketTree, key: str, objects: list[calls.Stored]) -> list[calls.Stored]:
    """Return the files of an unfinished file or folder."""
    return [o for o in objects if o.key == key] or calls.list_below(tree.bucket, key)


def _bucket(tree: BucketTree) -> HdfsBucket:
    return cast("HdfsBucket", tree.bucket)
