"""Contract of a store of files; its errors are those of `headrace.errors.stores`.

Paths are absolute within the store; a Location carries a path and its store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, runtime_checkable

from headrace.plugins import Seam
from headrace.storage.lease import Holder, Lease


@dataclass(frozen=True)
class Unfinished:
    """Partial output of a writer that was killed or is at work: a file or a folder that is not published."""

    #: Path under which it would have been published.
    path: PurePosixPath
    #: Bytes.
    size: int
    #: Time of the last write, in nanoseconds since 1970.
    modified_ns: int
    #: Removes it. A writer that is still at work cannot publish it afterwards.
    remove: Callable[[], None] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Info:
    """Metadata of a file, as a store lists it."""

    #: Bytes.
    size: int
    #: Time of the last write, in nanoseconds since 1970.
    modified_ns: int
    #: The store's ETag, where it has one: it differs for other content of the same path.
    tag: str = ""


@runtime_checkable
class Store(Protocol):
    """Files and folders at paths. One writer of a path at a time is ensured by a lease, readers may be many.

    A package of another store has a class with these methods, which is made without arguments, and offers it under the
    scheme of its URIs in the group `headrace.stores`. A path in it is /AUTHORITY/PATH.
    """

    def plain(self) -> Store:
        """Return the same store for reading what others write: no folder counts as published.

        Nothing is asked for beside what is read, which may be all that somebody is allowed to.
        """
        ...

    def uri(self, path: PurePosixPath) -> str:
        """Return the URI for Spark and other programs."""
        ...

    def display_name(self, path: PurePosixPath) -> str:
        """Return the name for messages."""
        ...

    def local_path(self, path: PurePosixPath) -> Path:
        """Return a real file, or a folder of such, with the same contents: the original, or a copy on this host.

        For readers that map files or read them in native code. What is published never changes, so a copy stays good.
        """
        ...

    def exists(self, path: PurePosixPath) -> bool: ...

    def is_file(self, path: PurePosixPath) -> bool: ...

    def is_dir(self, path: PurePosixPath) -> bool: ...

    def info(self, path: PurePosixPath) -> Info:
        """Return a file's metadata. Raises FileNotFoundError."""
        ...

    def glob(self, pattern: PurePosixPath) -> list[PurePosixPath]:
        """Files and folders that a pattern of `glob` matches (`**`: any folders), in any order."""
        ...

    def glob_files(self, pattern: PurePosixPath) -> dict[PurePosixPath, Info]:
        """Return the files, without folders, that a pattern of `glob` matches; in few calls, however many they are."""
        ...

    def free(self, path: PurePosixPath) -> int | None:
        """Bytes that can still be written there; None: there is no end."""
        ...

    def names(self, path: PurePosixPath, after: str = "") -> list[str]:
        """Names in a folder, sorted, without those of unfinished writes; empty where there is no folder.

        `after`: only names that sort after it. A store of objects then lists no others.
        """
        ...

    def sizes(self, path: PurePosixPath) -> dict[str, int]:
        """Bytes of the files in a folder, by name, without those of unfinished writes; in few calls."""
        ...

    def infos(self, path: PurePosixPath) -> dict[str, Info]:
        """Return the infos of all files below a folder, by path in it, without unfinished writes; in few calls."""
        ...

    def open(self, path: PurePosixPath) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        ...

    def open_parts(self, path: PurePosixPath) -> BinaryIO:
        """Open a file of which little is read, such as its end: no more is fetched. Raises FileNotFoundError."""
        ...

    def put(self, path: PurePosixPath, data: bytes, durable: bool) -> None:
        """Replace a file in one step: a reader sees the old one or this one, also after a kill at any point."""
        ...

    def put_new(self, path: PurePosixPath, data: bytes, durable: bool) -> bool:
        """Write a file in one step where there is none; False, and nothing done, where there is one. Of several that
        write it at once, one does, if no two write the same: a store of objects cannot tell whose bytes those are.
        """
        ...

    def get_tagged(self, path: PurePosixPath) -> tuple[bytes, str] | None:
        """Return a file's bytes and a tag that no other content has; None where there is no file."""
        ...

    def put_if(self, path: PurePosixPath, data: bytes, tag: str | None, durable: bool) -> bool:
        """Replace a file in one step where it still has the tag, or (None) write it where there is none.

        Of several who do so at once, one does, if no two write the same; to the others it is False, and nothing done.
        """
        ...

    def new_file(self, path: PurePosixPath, durable: bool) -> AbstractContextManager[Path]:
        """Give a library a local path that does not exist yet; the file appears in the store when the block ends."""
        ...

    def start_writeback(self, path: PurePosixPath) -> None:
        """Begin to write a file that is only in memory to the disk; it need not be there when this returns."""
        ...

    def sync_files(self, files: Sequence[PurePosixPath], root: PurePosixPath) -> None:
        """Return when the files, and their folders up to `root`, survive a power cut, whoever wrote them on whichever
        host. In a store of objects that is so once they are there."""
        ...

    def sync_all(self, paths: Sequence[PurePosixPath]) -> None:
        """Return when all that anybody has written to the file systems of these paths survives a power cut.

        Nothing is done in a store of objects.
        """
        ...

    def append(self, path: PurePosixPath, data: bytes) -> None:
        """Add to a file that others may read meanwhile: they may see a part of `data`. Not durable.

        In a store of objects, of two who add the same to the same file at once, one may be taken for the other.
        """
        ...

    def copy(self, source: PurePosixPath, target: PurePosixPath, share: bool) -> None:
        """Copy a file. `share`: one set of bytes where the store can; neither is changed afterwards."""
        ...

    def move(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """Give a file another name, in a folder that is being filled: no reader sees either."""
        ...

    def make_dir(self, path: PurePosixPath) -> None:
        """Make a folder for writers that know no more than a path."""
        ...

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file or a folder; nothing where there is none. A reader may see a part of a folder meanwhile."""
        ...

    def building(self, path: PurePosixPath, token: str) -> PurePosixPath:
        """Return where the folder `path` is filled before it is published; equal for all who know the token."""
        ...

    def begin(self, path: PurePosixPath, token: str, alone: bool) -> None:
        """Make that place, empty. `alone`: remove what others, who must have been killed, left of the same folder."""
        ...

    def commit(self, path: PurePosixPath, token: str, durable: bool) -> None:
        """Publish what was filled as `path`, in one step; an older folder of that name goes.

        Where that fails, what was filled is removed, unless it may have been published or the store will find it.

        Raises:
            headrace.storage.lease.LeaseLost: others have published it since, or have begun anew (a store of objects).
        """
        ...

    def unfinished(self, path: PurePosixPath) -> list[Unfinished]:
        """Return what killed or failed writers left in a folder, and what is being written there, by attempt."""
        ...

    def discard_unfinished(self, path: PurePosixPath) -> None:
        """Remove what killed or failed writers left in a folder, whatever they wrote."""
        ...

    def lease(self, path: PurePosixPath) -> AbstractContextManager[Lease]:
        """Be the only holder of `path` while the block runs. Raises headrace.storage.lease.Held."""
        ...

    def holder(self, path: PurePosixPath) -> Holder | None:
        """Return the lease's current holder, or None."""
        ...


#: Stores of packages, by the scheme of their URIs.
STORE_KINDS: Seam[Store] = Seam("headrace.stores", "store", Store, {}, {"hdfs": "headrace-hdfs"})  # type: ignore[type-abstract]
