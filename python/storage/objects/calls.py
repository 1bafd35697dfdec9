"""The calls of a store of objects. Each may fail, and a process may be killed between any two.

A bucket is one of obstore's, or a `Bucket` that makes the calls in its own way. Tests replace the calls to fail the
n-th (tests/unit/test_storage_objects_faults.py). A key is the path within a bucket.

What the store answers that is neither "not there" nor "the condition does not hold" becomes a UserError where it is
about permissions, else a StoreError; neither quotes more than the store's first line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from headrace.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

#: Bytes that a download holds in memory at a time.
_BLOCK = 8 << 20
#: Neither tags nor versions have it: they are headers of HTTP.
_BEFORE_VERSION = "\n"


class StoreError(OSError):
    """The store did not do as asked, after its client tried again."""


class StoreAway(StoreError):
    """The store cannot be reached: nothing to mend, try later; exit code 75."""


class ChangedInPlace(OSError):
    """An object is not the one that its folder's list names."""


@dataclass(frozen=True)
class Stored:
    """An object as the store describes it."""

    key: str
    #: Bytes.
    size: int
    #: Nanoseconds since 1970.
    modified_ns: int
    #: The store's name of this content at this key.
    tag: str
    #: Of this write of it, where the store counts them: GCS's generation, S3's version. A listing does not tell it.
    version: str | None = None

    @property
    def revision(self) -> str:
        """What `put_if` asks for: the tag, and the version behind it where one is known."""
        return self.tag if self.version is None else f"{self.tag}{_BEFORE_VERSION}{self.version}"


class Bucket(ABC):
    """A bucket of another kind than obstore's: its methods are the functions of this module."""

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
    def list_level(self, prefix: str) -> tuple[list[str], list[Stored]]: ...


def _of_any_bucket(of_obstore: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The same call of a `Bucket`, where it is one."""

    @wraps(of_obstore)
    def call(bucket: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(bucket, Bucket):
            found: T = getattr(bucket, of_obstore.__name__)(*args, **kwargs)
            return found
        return of_obstore(bucket, *args, **kwargs)

    return call


def get(bucket: Any, key: str) -> tuple[bytes, Stored] | None:
    """An object's bytes; None where there is none."""
    found = get_small(bucket, key, None)
    return None if found is None else (found[0] or b"", found[1])


@_of_any_bucket
def get_small(bucket: Any, key: str, limit: int | None) -> tuple[bytes | None, Stored] | None:
    """An object's bytes, or None in their place where it has more than `limit`; None where there is no object."""
    import obstore

    with _errors(key):
        try:
            found: Any = obstore.get(bucket, key)
            stored = _stored(found.meta)
            return (None if limit is not None and stored.size > limit else bytes(found.bytes())), stored
        except FileNotFoundError:
            return None


@_of_any_bucket
def get_range(bucket: Any, key: str, start: int, size: int) -> bytes:
    """Some bytes of an object. Raises FileNotFoundError."""
    import obstore

    with _errors(key):
        return bytes(obstore.get_range(bucket, key, start=start, length=size))


@_of_any_bucket
def head(bucket: Any, key: str) -> Stored | None:
    """What the store knows of an object; None where there is none."""
    import obstore

    with _errors(key):
        try:
            return _stored(obstore.head(bucket, key))
        except FileNotFoundError:
            return None


@_of_any_bucket
def put(bucket: Any, key: str, data: bytes) -> str:
    """Write an object, whole; its tag."""
    import obstore

    with _errors(key, writes=True):
        return str(obstore.put(bucket, key, data)["e_tag"])


@_of_any_bucket
def put_new(bucket: Any, key: str, data: bytes) -> str | None:
    """Write an object where there is none; None where there is one."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with _errors(key, writes=True):
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
    with _errors(key):
        try:
            there: Any = {"e_tag": tag, "version": version} if version else {"e_tag": tag}
            return str(obstore.put(bucket, key, data, mode=there)["e_tag"])
        except (PreconditionError, AlreadyExistsError, FileNotFoundError):
            return None


def is_there(bucket: Any, key: str, data: bytes) -> bool:
    """Whether an object has these very bytes.

    The client sends a PUT again that was not answered. Where the first one was done, the second is refused, by the
    bytes of the first: whoever writes something that nobody else does knows by this that it was written.
    """
    found = get(bucket, key)
    return found is not None and found[0] == data


@_of_any_bucket
def upload(bucket: Any, key: str, file: Path) -> None:
    """Write an object from a local file: a large one in parts, and it appears with the last."""
    import obstore

    with _errors(key, writes=True):
        obstore.put(bucket, key, file)


@_of_any_bucket
def download(bucket: Any, key: str, file: Path) -> Stored:
    """Write a local file, which may be there, from an object. Raises FileNotFoundError."""
    import obstore

    with _errors(key):
        found: Any = obstore.get(bucket, key)
        with open(file, "wb") as out:
            for block in found.stream(min_chunk_size=_BLOCK):
                out.write(block)
        return _stored(found.meta)


@_of_any_bucket
def copy(bucket: Any, source: str, target: str) -> None:
    """Copy an object within its bucket. Raises FileNotFoundError."""
    import obstore

    with _errors(source):
        obstore.copy(bucket, source, target)


@_of_any_bucket
def delete(bucket: Any, keys: Sequence[str]) -> None:
    """Remove objects; some may be gone."""
    import obstore

    if keys:
        with _errors(keys[0]):
            try:
                obstore.delete(bucket, list(keys))
            except FileNotFoundError:
                # Some stores tell, and stop there.
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(bucket, key)


@_of_any_bucket
def list_below(bucket: Any, prefix: str) -> list[Stored]:
    """All objects below a prefix, by key. A prefix is a whole folder's: `a` does not match `ab`."""
    import obstore

    with _errors(prefix):
        found = (_stored(o) for page in obstore.list(bucket, prefix or None, chunk_size=1000) for o in page)
        return sorted(found, key=lambda s: s.key)


@_of_any_bucket
def list_level(bucket: Any, prefix: str) -> tuple[list[str], list[Stored]]:
    """Names of the folders, and the objects, one level below a prefix."""
    import obstore

    with _errors(prefix):
        found: Any = obstore.list_with_delimiter(bucket, prefix or None)
        folders = sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in found["common_prefixes"])
        return folders, sorted((_stored(o) for o in found["objects"]), key=lambda s: s.key)


def _stored(meta: Any) -> Stored:
    modified = int(meta["last_modified"].timestamp() * 1e9)
    version = meta["version"]
    return Stored(
        str(meta["path"]), int(meta["size"]), modified, str(meta["e_tag"]), None if version is None else str(version)
    )


@contextmanager
def _errors(key: str, writes: bool = False) -> Iterator[None]:
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as e:
        raise UserError(
            f"the store refuses {key}: {_first_line(e)}. Credentials are those of the environment or of this machine "
            f"(docs/storage.md); they must allow to read, write, list and delete there"
        ) from None
    except FileNotFoundError:
        if not writes:
            raise
        raise UserError(f"{key} cannot be written: there is no such bucket, and headrace makes none") from None
    except BaseError as e:
        raise StoreError(f"{key}: {_first_line(e)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()
