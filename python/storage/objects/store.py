"""The store of objects; see the package. A path is /BUCKET/KEY.

A folder that is neither published nor holds a file is not there: objects know no empty folders.
"""

from __future__ import annotations

import glob
import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from headrace.storage.lease import Holder, Lease
from headrace.storage.objects import calls, clients, copies, lease, publish
from headrace.storage.objects.calls import Stored, crc32_of
from headrace.storage.objects.tree import BucketTree, Published, data_prefix
from headrace.storage.store import Info, Unfinished

#: Block size of requests, in bytes.
BLOCK = 8 << 20


class ObjectReader(io.RawIOBase):
    """Reads ranges; wrap it in a BufferedReader of BLOCK bytes."""

    def __init__(self, bucket: Any, stored: Stored) -> None:
        self._bucket, self._stored, self._position = bucket, stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stored.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._stored.size - self._position)
        if size <= 0:
            return 0
        buffer[:size] = calls.get_range(self._bucket, self._stored.key, self._position, size)
        self._position += size
        return size

    def readall(self) -> bytes:
        """Read the rest by one request: io's own method makes one for each 8 KiB."""
        size = max(0, self._stored.size - self._position)
        rest = calls.get_range(self._bucket, self._stored.key, self._position, size) if size else b""
        self._position += len(rest)
        return rest


#: Largest file that one request reads whole, in bytes.
_SMALL = 16 << 20
#: Bytes of a request for a small part of a file, such as the footer of a Parquet file.
_PART = 64 << 10


class ObjectStore:
    """Buckets of one kind of store; see the package and `Store`."""

    def __init__(
        self, scheme: str, open_bucket: Callable[[str, str], Any] = clients.open_bucket, lists: bool = True
    ) -> None:
        """Open a store; `lists` as of BucketTree."""
        self._scheme, self._open_bucket, self._lists = scheme, open_bucket, lists
        self._trees: dict[str, BucketTree] = {}
        self._lock = threading.Lock()
        self._of_others: ObjectStore | None = None

    def plain(self) -> ObjectStore:
        """See Store."""
        if not self._lists:
            return self
        with self._lock:
            if self._of_others is None:
                self._of_others = ObjectStore(self._scheme, self._connection, lists=False)
            return self._of_others

    def _connection(self, scheme: str, bucket: str) -> Any:
        return self._resolve(PurePosixPath("/", bucket))[0].bucket

    def _resolve(self, path: PurePosixPath) -> tuple[BucketTree, str]:
        """Return the bucket, the same one for all threads, and the key in it."""
        _, bucket, *parts = path.parts
        tree = self._trees.get(bucket)
        if tree is None:
            with self._lock:
                tree = self._trees.get(bucket)
                if tree is None:
                    tree = self._trees[bucket] = BucketTree(self._open_bucket(self._scheme, bucket), self._lists)
        return tree, "/".join(parts)

    def _stored(self, path: PurePosixPath) -> Stored | None:
        tree, key = self._resolve(path)
        file = tree.look(key, _head) if key else None
        return None if file is None else file[1]

    def _name(self, path: PurePosixPath) -> str:
        return f"{self._scheme}://{path.parts[1]}"

    def uri(self, path: PurePosixPath) -> str:
        """Return the URI for Hadoop's file system of this kind of store; for a published file or folder, that of its
        files.

        Raises:
            OSError: a published folder's files are in more than one place.
        """
        tree, key = self._resolve(path)
        if not self._lists:
            pass
        elif (published := tree.published(key)) is not None:
            key = self._place(path, published, "")
        elif (stored := self._stored(path)) is not None:
            key = stored.key
        elif (owner := tree.owner(key)) is not None:
            key = self._place(path, owner.published, owner.name)
        return f"{clients.HADOOP.get(self._scheme, self._scheme)}://{path.parts[1]}/{key}"

    def _place(self, path: PurePosixPath, published: Published, name: str) -> str:
        """Return the prefix of the files of a published folder, or of a folder in it."""
        below = f"{name}/" if name else ""
        keys = [f.key for n, f in published.list.files.items() if n.startswith(below)]
        tokens = {key.partition("/")[0] for key in keys}
        if len(tokens) > 1:
            raise OSError(
                f"{self.display_name(path)} has no URI: some of its files were replaced since it was published, and "
                f"the old and the new ones are in different places; publish it anew"
            )
        place = data_prefix(published.folder, *tokens)
        return f"{place}/{name}" if name else place

    def display_name(self, path: PurePosixPath) -> str:
        """SCHEME://BUCKET/KEY."""
        return f"{self._scheme}:/{path}"

    def local_path(self, path: PurePosixPath) -> Path:
        """Return a copy in this host's cache."""
        tree, key = self._resolve(path)
        stored = self._stored(path)
        if stored is not None:
            return copies.file(tree.bucket, self._name(path), stored)
        files = tree.files(key)
        if not files and not tree.is_folder(key):
            raise FileNotFoundError(f"there is no {self.display_name(path)}")
        return copies.tree(tree.bucket, self._name(path), files)

    def exists(self, path: PurePosixPath) -> bool:
        """Return whether there is a file, or a folder with a file in it."""
        return self.is_file(path) or self.is_dir(path)

    def is_file(self, path: PurePosixPath) -> bool:
        """Return whether there is a file."""
        return self._stored(path) is not None

    def is_dir(self, path: PurePosixPath) -> bool:
        """Return whether there is a published folder, or a file in a folder."""
        tree, key = self._resolve(path)
        return tree.is_folder(key)

    def info(self, path: PurePosixPath) -> Info:
        """See Store."""
        stored = self._stored(path)
        if stored is None:
            raise FileNotFoundError(f"there is no file {self.display_name(path)}")
        return _info(stored)

    def glob(self, pattern: PurePosixPath) -> list[PurePosixPath]:
        """See Store."""
        base, wild = _fixed(pattern)
        if not wild:
            return [pattern] if self.exists(pattern) else []
        tree, key = self._resolve(base)
        files = [PurePosixPath(name) for name in tree.files(key)]
        matches = re.compile(_expression(wild)).fullmatch
        folders = {parent for f in files for parent in f.parents if parent.name}
        paths = [p for p in files if matches(str(p))] + [p for p in folders if matches(f"{p}/")]
        return [base / p for p in sorted(paths)]

    def glob_files(self, pattern: PurePosixPath) -> dict[PurePosixPath, Info]:
        """See Store."""
        base, wild = _fixed(pattern)
        if not wild:
            stored = self._stored(pattern)
            if stored is not None:
                return {pattern: _info(stored)}
            # A missing bucket looks like a missing object to a look-up; a listing tells them apart.
            tree, key = self._resolve(pattern)
            calls.list_level(tree.bucket, key)
            return {}
        tree, key = self._resolve(base)
        matches = re.compile(_expression(wild)).fullmatch
        return {base / name: _info(stored) for name, stored in tree.files(key).items() if matches(name)}

    def free(self, path: PurePosixPath) -> int | None:
        """There is no end."""
        return None

    def names(self, path: PurePosixPath, after: str = "") -> list[str]:
        """See Store."""
        tree, key = self._resolve(path)
        return tree.names(key, after)

    def sizes(self, path: PurePosixPath) -> dict[str, int]:
        """See Store."""
        tree, key = self._resolve(path)
        return {name: stored.size for name, stored in tree.files(key).items() if "/" not in name}

    def infos(self, path: PurePosixPath) -> dict[str, Info]:
        """See Store."""
        tree, key = self._resolve(path)
        return {name: _info(stored) for name, stored in tree.files(key).items()}

    def open(self, path: PurePosixPath) -> BinaryIO:
        """Small files by one request, larger ones in blocks."""
        tree, key = self._resolve(path)
        small = tree.look(key, lambda bucket, k: calls.get_small(bucket, k, _SMALL)) if key else None
        if small is None:
            raise FileNotFoundError(f"there is no file {self.display_name(path)}")
        data, stored = small
        if data is not None:
            stored.check(self.display_name(path), crc32_of(data))
            return io.BytesIO(data)
        return cast(BinaryIO, io.BufferedReader(ObjectReader(tree.bucket, stored), BLOCK))

    def open_parts(self, path: PurePosixPath) -> BinaryIO:
        """See Store."""
        stored = self._stored(path)
        if stored is None:
            raise FileNotFoundError(f"there is no file {self.display_name(path)}")
        return cast(BinaryIO, io.BufferedReader(ObjectReader(self._resolve(path)[0].bucket, stored), _PART))

    def put(self, path: PurePosixPath, data: bytes, durable: bool) -> None:
        """See Store."""
        tree, key = self._resolve(path)
        owner = tree.owner(key)
        if owner is not None:
            publish.put_in(tree, owner.published, owner.name, data)
        else:
            publish.check_open(tree, key)
            calls.put(tree.bucket, key, data)
            publish.say_checksum(tree, key, crc32_of(data))
            tree.is_plain(key)

    def put_new(self, path: PurePosixPath, data: bytes, durable: bool) -> bool:
        """Put the file on the condition that none exists."""
        tree, key = self._resolve(path)
        if tree.owner(key) is not None:
            raise OSError(f"{self.display_name(path)}: a folder that is published has no files for many writers")
        written = calls.put_new(tree.bucket, key, data) is not None or calls.is_there(tree.bucket, key, data)
        tree.is_plain(key)
        return written

    def get_tagged(self, path: PurePosixPath) -> tuple[bytes, str] | None:
        """Return the bytes and the store's own tag."""
        tree, key = self._resolve(path)
        answer = calls.get(tree.bucket, key)
        return None if answer is None else (answer[0], answer[1].revision)

    def put_if(self, path: PurePosixPath, data: bytes, tag: str | None, durable: bool) -> bool:
        """Put the file on the condition that it has the tag."""
        if tag is None:
            return self.put_new(path, data, durable)
        tree, key = self._resolve(path)
        return calls.put_if(tree.bucket, key, data, tag) is not None or calls.is_there(tree.bucket, key, data)

    @contextmanager
    def new_file(self, path: PurePosixPath, durable: bool) -> Iterator[Path]:
        """Give a file of this host, which is uploaded at the end."""
        tree, key = self._resolve(path)
        local = copies.new_path(path.name)
        try:
            yield local
            owner = tree.owner(key)
            if owner is not None:
                publish.put_in(tree, owner.published, owner.name, local)
            else:
                publish.check_open(tree, key)
                calls.upload(tree.bucket, key, local)
                publish.say_checksum(tree, key, crc32_of(local))
                tree.is_plain(key)
        finally:
            copies.drop(local)

    def start_writeback(self, path: PurePosixPath) -> None:
        """Do nothing: what a PUT has stored is durable."""

    def sync_files(self, files: Sequence[PurePosixPath], root: PurePosixPath) -> None:
        """Do nothing: what a PUT has stored is durable."""

    def sync_all(self, paths: Sequence[PurePosixPath]) -> None:
        """Do nothing: what a PUT has stored is durable."""

    def append(self, path: PurePosixPath, data: bytes) -> None:
        """Objects cannot grow: the file is written anew, on the condition that it is the one that was read."""
        tree, key = self._resolve(path)
        while True:
            answer = calls.get(tree.bucket, key)
            old = b"" if answer is None else answer[0]
            if answer is None:
                written = calls.put_new(tree.bucket, key, data)
            else:
                written = calls.put_if(tree.bucket, key, old + data, answer[1].revision)
            if written is not None:
                return
            now = calls.get(tree.bucket, key)
            # It is this call's own write, if only the answer to the first try was lost; others may have appended since.
            if now is not None and now[0].startswith(old + data):
                return

    def copy(self, source: PurePosixPath, target: PurePosixPath, share: bool) -> None:
        """Copy within a bucket by the store itself."""
        stored = self._stored(source)
        if stored is None:
            raise FileNotFoundError(f"there is no file {self.display_name(source)}")
        (tree, _), (target_tree, key) = self._resolve(source), self._resolve(target)
        if tree is target_tree and target_tree.owner(key) is None:
            publish.check_open(target_tree, key)
            calls.copy(tree.bucket, stored.key, key)
            publish.say_checksum(target_tree, key, stored.crc32)
            target_tree.is_plain(key)
            return
        with self.new_file(target, durable=False) as local:
            calls.download(tree.bucket, stored.key, local)

    def move(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """Copy, then remove the source."""
        self.copy(source, target, share=False)
        self.remove(source)

    def make_dir(self, path: PurePosixPath) -> None:
        """Do nothing: a folder exists with its first file."""

    def remove(self, path: PurePosixPath) -> None:
        """See Store."""
        tree, key = self._resolve(path)
        publish.remove(tree, key)

    def building(self, path: PurePosixPath, token: str) -> PurePosixPath:
        """See Store."""
        _, bucket, *parts = path.parts
        return PurePosixPath("/", bucket, data_prefix("/".join(parts), token))

    def begin(self, path: PurePosixPath, token: str, alone: bool) -> None:
        """See Store."""
        tree, key = self._resolve(path)
        publish.begin(tree, key, token, alone)

    def commit(self, path: PurePosixPath, token: str, durable: bool) -> None:
        """See Store."""
        tree, key = self._resolve(path)
        publish.commit(tree, key, token)

    def unfinished(self, path: PurePosixPath) -> list[Unfinished]:
        """See Store. Parts of multipart uploads are in no listing."""
        tree, key = self._resolve(path)
        return [
            Unfinished(
                path / folder[len(key) :].lstrip("/"),
                sum(o.size for o in objects),
                max(o.modified_ns for o in objects),
                partial(publish.discard, tree, objects),
            )
            for (folder, _), objects in sorted(publish.unfinished(tree, key).items())
        ]

    def discard_unfinished(self, path: PurePosixPath) -> None:
        """See Store."""
        for left in self.unfinished(path):
            left.remove()

    def lease(self, path: PurePosixPath) -> AbstractContextManager[Lease]:
        """Hold a file that names the holder and the expiry, renewed while the block runs."""
        tree, key = self._resolve(path)
        return lease.lease(tree.bucket, key)

    def holder(self, path: PurePosixPath) -> Holder | None:
        """See Store."""
        tree, key = self._resolve(path)
        return lease.holder(tree.bucket, key)


def _info(stored: Stored) -> Info:
    return Info(stored.size, stored.modified_ns, stored.tag)


def _fixed(pattern: PurePosixPath) -> tuple[PurePosixPath, tuple[str, ...]]:
    """Split a pattern into the bucket and folders before its first wildcard, and the parts from there on (none: no
    wildcard).
    """
    parts = pattern.parts
    fixed = next((i for i in range(2, len(parts)) if glob.has_magic(parts[i])), len(parts))
    return PurePosixPath(*parts[:fixed]), parts[fixed:]


def _head(bucket: Any, key: str) -> tuple[None, Stored] | None:
    stored = calls.head(bucket, key)
    return None if stored is None else (None, stored)


def _expression(parts: tuple[str, ...]) -> str:
    """Return a regular expression for a glob's parts; it matches files, and folders with a slash behind them."""
    expression = ""
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            expression += r"(?:(?!\.)[^/]+/)*" + (r"(?:(?!\.)[^/]+)?" if last else "")
        else:
            expression += _segment(part) + ("/?" if last else "/")
    return expression


def _segment(part: str) -> str:
    """Return a regular expression for one name: `*`, `?` and `[...]` match no dot at the beginning."""
    expression = "(?=[^/])" if part.startswith(".") else r"(?=[^/.])"
    position = 0
    while position < len(part):
        c = part[position]
        end = part.find("]", position + 2) if c == "[" else -1
        if c == "*":
            expression += "[^/]*"
        elif c == "?":
            expression += "[^/]"
        elif end > 0:
            inner, negated = part[position + 1 : end], part[position + 1] == "!"
            inner = re.sub(r"([\\\[^&~|])", r"\\\1", inner[negated:])
            expression += f"[{'^' if negated else ''}{inner}]"
            position = end
        else:
            expression += re.escape(c)
        position += 1
    return expression
