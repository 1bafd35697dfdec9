"""A place in a store: a file or a folder, there or not yet."""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace
from headrace.storage.lease import Fence, Holder, Lease, LeaseLost
from headrace.storage.local_store import LocalStore
from headrace.storage.store import STORE_KINDS, Info, Store, Unfinished
from headrace.storage.uri import SCHEMES, parse_uri, stored_name

#: Concurrent look-ups of files.
_AT_ONCE = 16
#: Stores by the scheme of their URIs; stores of objects and of packages are added at first use.
STORES: dict[str, Store] = {"file": LocalStore()}


def _store_of(scheme: str) -> Store:
    """Return the store of a scheme. Raises UserError where its package is not installed, as on an executor."""
    store = STORES.get(scheme)
    if store is None and scheme in SCHEMES:
        from headrace.storage.objects.store import ObjectStore  # late: most processes use file systems only

        store = STORES.setdefault(scheme, ObjectStore(scheme))
    if store is None:
        store = STORES.setdefault(scheme, STORE_KINDS.find(scheme, f"{scheme}:")())
    return store


@dataclass(frozen=True, order=True)
class Location:
    """A path in one of STORES. Small and picklable: it goes to Spark's tasks as it is.

    `str()` is what messages show; `uri` is what Spark is given.
    """

    path: PurePosixPath
    scheme: str = "file"
    #: Whether writes are fsynced before the call returns. False in scratch, and below a folder that is being filled:
    #: its publication syncs all of it at once.
    durable: bool = field(default=True, compare=False)
    #: Whether it belongs to another writer and is only read: see `Store.plain`.
    plain: bool = field(default=False, compare=False)

    @property
    def _store(self) -> Store:
        store = _store_of(self.scheme)
        return store.plain() if self.plain else store

    def as_plain(self) -> Location:
        """Return the same place for reading what others write: no folder counts as published by headrace."""
        return replace(self, plain=True)

    def transient(self) -> Location:
        """Return the same place for files that need not survive a power cut: nobody waits for their sync."""
        return replace(self, durable=False)

    def __str__(self) -> str:
        return self._store.display_name(self.path)

    def __truediv__(self, name: str | PurePosixPath) -> Location:
        return replace(self, path=self.path / name)

    def seen_from(self, start: Location) -> str:
        """Return the path that leads here from another folder of the same store, such as `../../a/b`."""
        return posixpath.relpath(str(self.path), str(start.path))

    def following(self, path: str) -> Location:
        """Return the place that a path of `seen_from` leads to from here."""
        return replace(self, path=PurePosixPath(posixpath.normpath(str(self.path / path))))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def parent(self) -> Location:
        return replace(self, path=self.path.parent)

    def below(self, folder: Location) -> str:
        """Its path relative to a folder above it. Raises ValueError where that is none above it."""
        if self.scheme != folder.scheme:
            raise ValueError(f"{self} is not below {folder}")
        return str(self.path.relative_to(folder.path))

    def is_below(self, folder: Location) -> bool:
        """Return whether it is the folder or a path in it."""
        return self.scheme == folder.scheme and self.path.is_relative_to(folder.path)

    @property
    def uri(self) -> str:
        """For Spark and other programs that open it themselves."""
        return self._store.uri(self.path)

    @property
    def spark_path(self) -> str:
        """Return the path for a reader of Spark. (Hadoop decodes nothing, so a path with a blank is no URI to it.)"""
        return str(self) if self.scheme == "file" else self.uri

    def local_path(self) -> Path:
        """Return a real file or folder with the same contents, for memory maps and native readers; see
        `Store.local_path`.
        """
        return self._store.local_path(self.path)

    def __fspath__(self) -> str:
        """Return `local_path`, for libraries that open a path."""
        return str(self.local_path())

    def exists(self) -> bool:
        return self._store.exists(self.path)

    def is_file(self) -> bool:
        return self._store.is_file(self.path)

    def is_dir(self) -> bool:
        return self._store.is_dir(self.path)

    def info(self) -> Info:
        """Size and time of a file. Raises FileNotFoundError."""
        return self._store.info(self.path)

    def size(self) -> int:
        """Bytes of a file. Raises FileNotFoundError."""
        return self.info().size

    def free(self) -> int | None:
        """Bytes that can still be written there; None: there is no end."""
        return self._store.free(self.path)

    def entries(self) -> list[Location]:
        """Files and folders in a folder, by name; empty where there is no folder. Unfinished writes are left out."""
        return [self / name for name in self.names()]

    def names(self, after: str = "") -> list[str]:
        """Return the names of `entries` that sort after `after`. Of a long folder this is quicker than `entries`."""
        return self._store.names(self.path, after)

    def sizes(self) -> dict[str, int]:
        """Bytes of the files in a folder, by name; empty where there is none. One question, however many they are."""
        return self._store.sizes(self.path)

    def glob(self) -> list[Location]:
        """Return the files and folders that match the place read as a pattern of `glob`; unsorted."""
        return [replace(self, path=path) for path in self._store.glob(self.path)]

    def glob_files(self) -> dict[Location, Info]:
        """Return the files, without folders, that match the place read as a pattern of `glob`; unsorted.

        In an object store one listing tells all of it, however many they are.
        """
        return {replace(self, path=path): info for path, info in self._store.glob_files(self.path).items()}

    def files(self) -> Iterator[Location]:
        """All files below a folder, in order of their paths."""
        for entry in self.entries():
            if entry.is_dir():
                yield from entry.files()
            else:
                yield entry

    def infos(self) -> dict[str, Info]:
        """Return the infos of all files below a folder, by their paths in it; empty where there is none.

        One listing for all.
        """
        return self._store.infos(self.path)

    def open(self) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        return self._store.open(self.path)

    def open_parts(self) -> BinaryIO:
        """Open a file of which little is read, such as its end: no more is fetched."""
        return self._store.open_parts(self.path)

    def read_bytes(self) -> bytes:
        """All of a file. Raises FileNotFoundError."""
        with self.open() as f:
            return f.read()

    def read_text(self) -> str:
        """All of a file, as UTF-8. Raises FileNotFoundError."""
        return self.read_bytes().decode()

    def put_bytes(self, data: bytes) -> None:
        """Replace a file in one step; folders above it are made."""
        self._store.put(self.path, data, self.durable)

    def put_text(self, text: str) -> None:
        """Replace a file with UTF-8 text in one step."""
        self.put_bytes(text.encode())

    def put_new_text(self, text: str) -> bool:
        """Write a file in one step where there is none; False, and nothing done, where there is one."""
        return self._store.put_new(self.path, text.encode(), self.durable)

    def read_tagged(self) -> tuple[bytes, str] | None:
        """All of a file that is in no published folder, and a tag for `put_if`; None where there is no file."""
        return self._store.get_tagged(self.path)

    def put_if(self, data: bytes, tag: str | None) -> bool:
        """Replace a file in one step where it still has the tag, or (None) write it where there is none.

        False, and nothing done, where another writer was first.
        """
        return self._store.put_if(self.path, data, tag, self.durable)

    def new_file(self) -> AbstractContextManager[Path]:
        """Give a local path for a library to write to; the file appears here when the block ends well, in one step.

        Whatever the block leaves there is removed when it fails. Folders above are made.
        """
        return self._store.new_file(self.path, self.durable)

    def start_writeback(self) -> None:
        """Begin to write a large file of a folder that is being filled to the disk: publication waits for less then."""
        self._store.start_writeback(self.path)

    @contextmanager
    def new_folder(self, alone: bool = True) -> Iterator[Location]:
        """Give an empty folder to fill; it appears here when the block ends well, in one step, else it is removed.

        A complete folder that is here is replaced: callers that want to keep one look for it before. What an earlier,
        killed attempt left is removed first. One writer at a time is the caller's to ensure (the pipeline's lease).

        Args:
            alone: False where others may make the same folder now, with the same contents (a task that Spark runs
                twice): one of them stays.
        """
        token = uuid.uuid4().hex[:8]
        folder = self.begin(token, alone)
        try:
            yield folder
        except BaseException:
            folder.remove_quietly()
            raise
        self.commit(token)

    def building(self, token: str) -> Location:
        """Return where the folder is filled between `begin` and `commit`, for each of many writers that know the token.

        Files put there are on the disk at once: only the writer's own host can see to that.
        """
        return replace(self, path=self._store.building(self.path, token))

    def begin(self, token: str, alone: bool = True) -> Location:
        """Make the place to fill, empty; see `new_folder`."""
        self._store.begin(self.path, token, alone)
        return replace(self.building(token), durable=False)

    def commit(self, token: str) -> None:
        """Publish what was filled, in one step; all writers must have ended. An older folder goes.

        Where that fails, what was filled is removed, unless it may have been published.
        """
        self._store.commit(self.path, token, self.durable)

    def append(self, data: bytes) -> None:
        """Add to a file that others may read meanwhile, such as a log: they may see a part. Not durable."""
        self._store.append(self.path, data)

    def copy_from(self, source: Location, share: bool = False) -> None:
        """Become a file or folder of the same contents as `source`; files that are here are replaced.

        A folder does not appear in one step: copy into one that is being filled.

        Args:
            share: keep one set of bytes where the store can; neither may be changed in place afterwards.
        """
        if source.is_dir():
            for file in source.files():
                (self / file.below(source)).copy_from(file, share)
        elif source.scheme == self.scheme:
            self._store.copy(source.path, self.path, share)
        else:
            with self.new_file() as path, source.open() as f, open(path, "wb") as out:
                while block := f.read(1 << 20):
                    out.write(block)

    def move_to(self, target: Location) -> None:
        """Give a file another name in the same store, in a folder that is being filled: no reader sees either."""
        self._store.move(self.path, target.path)

    def make_dir(self) -> None:
        """Make a folder for writers that know no more than a path (Spark, native code); it may exist."""
        self._store.make_dir(self.path)

    def remove(self) -> None:
        """Remove a file, or a folder with all below it; nothing where there is none.

        A reader may see a part of a folder meanwhile: only what nothing names any more is removed.
        """
        self._store.remove(self.path)

    def remove_quietly(self) -> None:
        """Remove a file or folder of no use after a failure; what cannot be removed now stays."""
        try:
            self.remove()
        except (OSError, UserError):  # the store is away, or refuses
            return

    def unfinished(self) -> list[Unfinished]:
        """Return what killed or failed writers left in this folder, and what is being written there; listings leave it
        out.
        """
        return self._store.unfinished(self.path)

    def discard_unfinished(self) -> None:
        """Remove what killed or failed writers left in this folder. No other writer may be at work in it."""
        self._store.discard_unfinished(self.path)

    def lease(self) -> AbstractContextManager[Lease]:
        """Be the only holder of this name while the block runs.

        Raises:
            headrace.storage.lease.Held: another process is; says which.
        """
        return self._store.lease(self.path)

    def holder(self) -> Holder | None:
        """Return the holder of the lease of this name, or None."""
        return self._store.holder(self.path)


def sync_files(files: Sequence[Location], root: Location) -> None:
    """Return when files below a folder, and the folders between, survive a power cut, whoever wrote them."""
    of_store = [file.path for file in files if file.is_below(root)]
    root._store.sync_files(of_store, root.path)


def sync_all(places: Sequence[Location]) -> None:
    """Return when all that anybody has written to the file systems of these places survives a power cut."""
    for scheme in dict.fromkeys(place.scheme for place in places):
        _store_of(scheme).sync_all([place.path for place in places if place.scheme == scheme])


def location_of(text: str, key: str = "path", glob: bool = False) -> Location:
    """Return the place that a path or a URI names; `parse_uri` lists the forms.

    Args:
        text: as the user gave it.
        key: the key or variable that holds it, for the message.
        glob: whether it is a pattern for `Location.glob`.

    Raises:
        UserError: it names none.
    """
    scheme, path = parse_uri(text, key, glob)
    return Location(path, scheme)


def location_named(uri: str, key: str) -> Location:
    """Return the place of a file that a table's metadata name; `stored_name` lists the forms.

    Raises:
        UserError: headrace's paths cannot name it.
    """
    scheme, path = stored_name(uri, key)
    return Location(path, scheme)


def missing(files: Sequence[Location]) -> Location | None:
    """Return the first of some files that does not exist, or None. Several are checked at once in a store."""
    if not files:
        return None
    with ThreadPoolExecutor(min(_AT_ONCE, len(files)), "look") as pool:
        present = pool.map(Location.is_file, files)
        return next((file for file, is_there in zip(files, present, strict=True) if not is_there), None)


def not_as_written(sizes: Mapping[Location, int]) -> str | None:
    """Return why the first of some files differs in size from what was written, or None.

    Several are checked at once.
    """
    if not sizes:
        return None
    with ThreadPoolExecutor(min(_AT_ONCE, len(sizes)), "look") as pool:
        return next((reason for reason in pool.map(_not_as_written, sizes, sizes.values()) if reason is not None), None)


def _not_as_written(file: Location, size: int) -> str | None:
    try:
        existing = file.size()
    except (FileNotFoundError, NotADirectoryError):
        return f"{file} is gone"
    except ChangedInPlace:
        return f"{file} was changed in place"
    return None if existing == size else f"{file} has {existing} bytes, not {size}"


def local(path: str | os.PathLike[str]) -> Location:
    """Return a place on this machine's file system; relative paths start at the working directory."""
    return Location(PurePosixPath(os.path.abspath(path)))


def copies_folder() -> Path:
    """Return the folder of this host's copies of files in stores, and of files on their way to one.

    Raises:
        UserError: as `headrace.storage.objects.copies.folder`.
    """
    from headrace.storage.objects import copies

    return copies.folder()


def release_copy(path: Path) -> None:
    """Say of a file that it is not read soon again: where it is a copy of an object, it is the first to go."""
    from headrace.storage.objects import copies

    copies.release(path)


def put_fenced(
    file: Location, text: str, fences: Sequence[Fence], tokens_of: Callable[[str], Mapping[str, int]]
) -> None:
    """Replace a file in one step, on the condition that it is still the one that was looked at.

    Args:
        file: its place.
        text: what is to be there, which says the tokens of `fences`.
        fences: of the leases that the process holds; none: nobody else writes there.
        tokens_of: by lease, the tokens that a text says.

    Raises:
        LeaseLost: what is there was written by a later holder of one of the leases, also where that was a moment ago.
    """
    if not fences:
        file.put_text(text)
        return
    while True:
        tagged = file.read_tagged()
        tokens = {} if tagged is None else tokens_of(tagged[0].decode())
        if any(tokens.get(fence.lease, 0) > fence.token for fence in fences):
            raise LeaseLost(f"{file} was written by a later run; this one's is not. Run it again")
        if file.put_if(text.encode(), None if tagged is None else tagged[1]):
            return
