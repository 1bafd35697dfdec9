"""The calls of a store of objects. Each may fail, and a process may be killed between any two.

A bucket is one of obstore's, or a `Bucket` that makes the calls in its own way. Tests replace the calls to fail the
n-th (tests/unit/test_storage_objects_faults.py). A key is the path within a bucket.

What the store answers that is neither "not there" nor "the condition does not hold" becomes an error of
`headrace.errors.stores`.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from headrace.errors.stores import ChangedInPlace, error_of_store
from headrace.storage.objects import clients

_CHECKSUM_BLOCK = 1 << 20


def crc32_of(content: bytes | Path) -> str:
    """Return the CRC-32 of bytes or of a local file, as 8 hexadecimal digits."""
    if isinstance(content, bytes):
        return f"{zlib.crc32(content):08x}"
    crc = 0
    with open(content, "rb") as file:
        while block := file.read(_CHECKSUM_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


P = ParamSpec("P")
T = TypeVar("T")

#: Block size of downloads, in bytes.
_BLOCK = 8 << 20
#: Separates a tag and a version: both are HTTP headers, which have no newline.
_BEFORE_VERSION = "\n"


@dataclass(frozen=True)
class Stored:
    """An object as the store describes it."""

    key: str
    #: Bytes.
    size: int
    #: Nanoseconds since 1970.
    modified_ns: int
    #: The store's ETag of this content.
    tag: str
    #: Version of this write (GCS's generation, S3's version id); None where the store has none. Listings lack it.
    version: str | None = None
    #: CRC-32 of the content as it was written, in hex, where the list of its folder has it.
    crc32: str | None = None

    def check(self, place: str, crc32: str) -> None:
        """Raise ChangedInPlace where the content that was read has another checksum than the one that was written."""
        if self.crc32 not in (None, crc32):
            raise ChangedInPlace(f"{place} is damaged: its CRC-32 is {crc32}, and {self.crc32} was written")

    @property
    def revision(self) -> str:
        """Revision for `put_if`: the tag, and the version where the store has one."""
        return self.tag if self.version is None else f"{self.tag}{_BEFORE_VERSION}{self.version}"


class Bucket(ABC):
    """A bucket of another kind than obstore's: its methods are the functions of this module."""

    @abstractmethod
    def display_name(self, key: str) -> str: ...

    @abstractmethod
    def get_small(self, key: str, limit: int | None) -> tuple[bytes | None, Stored] | None: ...

    @abstractmethod
    def get_range(self, key: str, start: int, size: int) -> bytes: ...

    @abstractmethod
    def head(self, key: str) -> Stored | None: ...

    @abstractmethod
    def put(self, key: str, data: bytes) -> str: ...

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> str | None: ...

    @abstractmethod
    def put_if(self, key: str, data: bytes, revision: str) -> str | None: ...

    @abstractmethod
    def upload(self, key: str, file: Path) -> None: ...

    @abstractmethod
    def download(self, key: str, file: Path) -> Stored: ...

    @abstractmethod
    def copy(self, source: str, target: str) -> None: ...

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def list_below(self, prefix: str) -> list[Stored]: ...

    @abstractmethod
    def list_level(self, prefix: str, after: str = "") -> tuple[list[str], list[Stored]]: ...


def _of_any_bucket(of_obstore: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return the call with the connection of a `Bucket` in place of the bucket, where it is one."""

    @wraps(of_obstore)
    def call(bucket: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(bucket, Bucket):
            answer: T = getattr(bucket, of_obstore.__name__)(*args, **kwargs)
            return answer
        return of_obstore(bucket, *args, **kwargs)

    return call


def get(bucket: Any, key: str) -> tuple[bytes, Stored] | None:
    """Return an object's bytes, or None where there is no object."""
    answer = get_small(bucket, key, None)
    return None if answer is None else (answer[0] or b"", answer[1])


@_of_any_bucket
def get_small(bucket: Any, key: str, limit: int | None) -> tuple[bytes | None, Stored] | None:
    """Return an object's bytes, with None in their place above `limit`; None where there is no object."""
    import obstore

    with _errors(bucket, key):
        try:
            answer: Any = obstore.get(bucket, key)
            stored = _stored(answer.meta)
            return (None if limit is not None and stored.size > limit else bytes(answer.bytes())), stored
        except FileNotFoundError:
            return None


@_of_any_bucket
def get_range(bucket: Any, key: str, start: int, size: int) -> bytes:
    """Return some bytes of an object. Raises FileNotFoundError."""
    import obstore

    with _errors(bucket, key):
        return bytes(obstore.get_range(bucket, key, start=start, length=size))


@_of_any_bucket
def head(bucket: Any, key: str) -> Stored | None:
    """Return the store's metadata of an object, or None where there is no object."""
    import obstore

    with _errors(bucket, key):
        try:
            return _stored(obstore.head(bucket, key))
        except FileNotFoundError:
            return None


@_of_any_bucket
def put(bucket: Any, key: str, data: bytes) -> str:
    """Write an object, whole; its tag."""
    import obstore

    with _errors(bucket, key, writes=True):
        return str(obstore.put(bucket, key, data)["e_tag"])


@_of_any_bucket
def put_new(bucket: Any, key: str, data: bytes) -> str | None:
    """Write an object where there is none; None where there is one."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with _errors(bucket, key, writes=True):
        try:
            return str(obstore.put(bucket, key, data, mode="create")["e_tag"])
        except (AlreadyExistsError, PreconditionError):
            return None


@_of_any_bucket
def put_if(bucket: Any, key: str, data: bytes, revision: str) -> str | None:
    """Write an object in place of the one of that revision; None where another one, or none, is there.

    S3 and Azure compare the tag, and GCS the version alone.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    tag, _, version = revision.partition(_BEFORE_VERSION)
    with _errors(bucket, key):
        try:
            condition: Any = {"e_tag": tag, "version": version} if version else {"e_tag": tag}
            return str(obstore.put(bucket, key, data, mode=condition)["e_tag"])
        except (PreconditionError, AlreadyExistsError, FileNotFoundError):
            return None


def is_there(bucket: Any, key: str, data: bytes) -> bool:
    """Return whether an object has exactly these bytes.

    The client sends a PUT again that was not answered. Where the first one was done, the second is refused, by the
    bytes of the first: whoever writes something that nobody else does knows by this that it was written.
    """
    answer = get(bucket, key)
    return answer is not None and answer[0] == data


@_of_any_bucket
def upload(bucket: Any, key: str, file: Path) -> None:
    """Write an object from a local file: a large one in parts, and it appears with the last."""
    import obstore

    with _errors(bucket, key, writes=True):
        obstore.put(bucket, key, file)


@_of_any_bucket
def download(bucket: Any, key: str, file: Path) -> Stored:
    """Write a local file, which may be there, from an object. Raises FileNotFoundError."""
    import obstore

    with _errors(bucket, key):
        answer: Any = obstore.get(bucket, key)
        with open(file, "wb") as out:
            for block in answer.stream(min_chunk_size=_BLOCK):
                out.write(block)
        return _stored(answer.meta)


@_of_any_bucket
def copy(bucket: Any, source: str, target: str) -> None:
    """Copy an object within its bucket. Raises FileNotFoundError."""
    import obstore

    with _errors(bucket, source):
        obstore.copy(bucket, source, target)


@_of_any_bucket
def delete(bucket: Any, keys: Sequence[str]) -> None:
    """Remove objects; some may be gone."""
    import obstore

    if keys:
        with _errors(bucket, keys[0]):
            try:
                obstore.delete(bucket, list(keys))
            except FileNotFoundError:
                # Some stores report a missing key, and stop there.
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(bucket, key)


@_of_any_bucket
def list_below(bucket: Any, prefix: str) -> list[Stored]:
    """All objects below a prefix, by key. A prefix is a whole folder's: `a` does not match `ab`."""
    import obstore

    with _errors(bucket, prefix):
        objects = (_stored(o) for page in obstore.list(bucket, prefix or None, chunk_size=1000) for o in page)
        return sorted(objects, key=lambda s: s.key)


@_of_any_bucket
def list_level(bucket: Any, prefix: str, after: str = "") -> tuple[list[str], list[Stored]]:
    """Names of the folders, and the objects, one level below a prefix.

    `after`: those whose names sort before it may be left out.
    """
    import obstore

    with _errors(bucket, prefix):
        if after:
            return _level_after(bucket, prefix, after)
        level: Any = obstore.list_with_delimiter(bucket, prefix or None)
        folders = sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in level["common_prefixes"])
        return folders, sorted((_stored(o) for o in level["objects"]), key=lambda s: s.key)


def _level_after(bucket: Any, prefix: str, after: str) -> tuple[list[str], list[Stored]]:
    """`list_level` by a list of all keys from a name on: stores know no beginning of a list of one level."""
    import obstore

    start = f"{prefix}/" if prefix else ""
    folders, level = set[str](), list[Stored]()
    for page in obstore.list(bucket, prefix or None, offset=start + after, chunk_size=1000):
        for meta in page:
            folder, slash, _ = str(meta["path"]).removeprefix(start).partition("/")
            if slash:
                folders.add(folder)
            else:
                level.append(_stored(meta))
    return sorted(folders), sorted(level, key=lambda stored: stored.key)


def _stored(meta: Any) -> Stored:
    modified = int(meta["last_modified"].timestamp() * 1e9)
    version = meta["version"]
    return Stored(
        str(meta["path"]), int(meta["size"]), modified, str(meta["e_tag"]), None if version is None else str(version)
    )


@contextmanager
def _errors(bucket: Any, key: str, writes: bool = False) -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError) as e:
        known = error_of_store(e, display_name(bucket, key), _s3_bucket(bucket), os.environ, writes)
        if known is None:
            raise
        raise known from None


def _s3_bucket(bucket: Any) -> str | None:
    """Return the name of a bucket in S3, or None for other stores."""
    from obstore.store import S3Store

    return str(bucket.config["bucket"]) if isinstance(bucket, S3Store) else None


@_of_any_bucket
def display_name(bucket: Any, key: str) -> str:
    """Return an object's name for messages."""
    from obstore.store import AzureStore, GCSStore, S3Store

    if isinstance(bucket, S3Store):
        return f"s3://{bucket.config['bucket']}/{key}"
    if isinstance(bucket, GCSStore):
        return f"gs://{bucket.config['bucket']}/{key}"
    if isinstance(bucket, AzureStore):
        config = bucket.config
        _, blob, cloud = str(config.get("endpoint", "")).partition(f"//{config['account_name']}.blob.")
        domain = f"dfs.{cloud}" if blob else clients.AZURE
        return f"abfss://{config['container_name']}@{config['account_name']}.{domain}/{key}"
    return key
