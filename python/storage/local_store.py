"""The store on a file system. It has renames, so what is published is one rename.

A reader, and a rerun after a kill between any two lines, sees:

- `put`, `put_new`, `new_file`: the old file or the new one. Before the rename there is `.NAME.TOKEN.partial` beside
  it, which nothing lists, and which the next publication of a folder of that name or `discard_unfinished` removes.
- `begin` to `commit`: the old folder or none, and `.NAME.TOKEN.partial` with a part of the new one.
- `commit`: the old folder until the exchange of the two names, the new one from it on. All of it is on the disk before
  (files, then folders, from the inside out), the exchange itself after the last line. Between, a power cut may bring
  the old folder back, whole. Where a file system cannot exchange names (NFS), the old folder is renamed away first: a
  kill between the two renames leaves none, which its stage sees, and a rerun makes it again.
- `put_if`: as `put`. Its lock is `.NAME.lock` beside the file, which stays and which nothing lists.
- `remove`: of a folder, a part. Only what no manifest and no list names any more is removed.
"""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from headrace.storage import system
from headrace.storage.lease import Holder, Lease, exclusive, flock_holder, flock_lease
from headrace.storage.store import Info, Unfinished

#: Suffix of unfinished writes: no glob of a landing folder matches it, and no list shows it.
_PARTIAL = ".partial"
#: Suffix of the lock files of `put_if`; no list shows them.
_LOCK = ".lock"
#: Errors of a name that leads to no file: a link to nothing, or to itself.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
#: Concurrent fsyncs: a disk serves several at once.
_FSYNCS_AT_ONCE = 8
#: Seconds that this process has waited for fsync, summed over threads.
_waited = 0.0


def sync_seconds() -> float:
    """Return the seconds that this process has waited for files and folders to be on the disk."""
    return _waited


class LocalStore:
    """Paths of this machine's file system; see the module and `Store`."""

    def plain(self) -> LocalStore:
        """See Store."""
        return self

    def uri(self, path: PurePosixPath) -> str:
        """file:///..."""
        return Path(path).as_uri()

    def display_name(self, path: PurePosixPath) -> str:
        """Return the path."""
        return str(path)

    def local_path(self, path: PurePosixPath) -> Path:
        """Return the file itself."""
        return Path(path)

    def exists(self, path: PurePosixPath) -> bool:
        """Return whether there is a file or a folder."""
        return Path(path).exists()

    def is_file(self, path: PurePosixPath) -> bool:
        """Return whether there is a file."""
        return Path(path).is_file()

    def is_dir(self, path: PurePosixPath) -> bool:
        """Return whether there is a folder."""
        return Path(path).is_dir()

    def info(self, path: PurePosixPath) -> Info:
        """See Store."""
        stat = Path(path).stat()
        return Info(stat.st_size, stat.st_mtime_ns)

    def glob(self, pattern: PurePosixPath) -> list[PurePosixPath]:
        """See Store. Of folders that links lead to `**` takes each once, and none that the link itself is in."""
        parts = pattern.parts
        if "**" not in parts:
            # Path.glob takes no absolute patterns.
            return [PurePosixPath(text) for text in glob.glob(str(pattern))]  # noqa: PTH207
        cut = parts.index("**")
        rest = PurePosixPath(*parts[cut + 1 :]) if cut + 1 < len(parts) else None
        paths: dict[PurePosixPath, None] = {}
        for base in self.glob(PurePosixPath(*parts[:cut])):
            for folder, _ in _walk(base, lambda name: name.startswith(".")):
                escaped = PurePosixPath(glob.escape(str(folder)))
                paths |= dict.fromkeys(self.glob(escaped / (rest or "*")))
        return list(paths)

    def glob_files(self, pattern: PurePosixPath) -> dict[PurePosixPath, Info]:
        """See Store. A file that goes meanwhile is none; one that links give several names has one of them."""
        infos: dict[PurePosixPath, Info] = {}
        names: dict[tuple[int, int], list[PurePosixPath]] = {}
        for path in self.glob(pattern):
            try:
                status = Path(path).stat()
            except OSError as e:
                if e.errno in _NO_FILE:
                    continue
                raise
            if stat.S_ISREG(status.st_mode):
                infos[path] = Info(status.st_size, status.st_mtime_ns)
                names.setdefault((status.st_dev, status.st_ino), []).append(path)
        for several in names.values():
            if len(several) > 1:
                first = dict[str, PurePosixPath]()
                for path in sorted(several, key=lambda path: (Path(path).is_symlink(), path)):
                    if first.setdefault(os.path.realpath(path), path) != path:  # hard links stay
                        del infos[path]
        return infos

    def free(self, path: PurePosixPath) -> int | None:
        """Return the free bytes of the file system that the path, or the nearest existing folder above it, is on."""
        return shutil.disk_usage(_existing(Path(path))).free

    def names(self, path: PurePosixPath, after: str = "") -> list[str]:
        """See Store."""
        try:
            with os.scandir(path) as entries:
                return sorted(e.name for e in entries if e.name > after and not _is_hidden(e.name))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, path: PurePosixPath) -> dict[str, int]:
        """See Store."""
        try:
            with os.scandir(path) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file() and not _is_hidden(e.name)}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def infos(self, path: PurePosixPath) -> dict[str, Info]:
        """See Store."""
        infos: dict[str, Info] = {}
        for folder, files in _walk(path, _is_hidden):
            for file in (folder / name for name in files):
                try:
                    infos[str(file.relative_to(path))] = self.info(file)
                except OSError as e:
                    if e.errno not in _NO_FILE:  # removed since it was listed
                        raise
        return infos

    def open(self, path: PurePosixPath) -> BinaryIO:
        """See Store."""
        return open(path, "rb")

    def open_parts(self, path: PurePosixPath) -> BinaryIO:
        """See Store."""
        return self.open(path)

    def put(self, path: PurePosixPath, data: bytes, durable: bool) -> None:
        """See Store."""
        with self.new_file(path, durable) as partial:
            system.write(partial, data)

    def put_new(self, path: PurePosixPath, data: bytes, durable: bool) -> bool:
        """See Store."""
        final = Path(path)
        changed = system.make_folder(final.parent)
        partial = _partial(final)
        try:
            system.write(partial, data)
            if durable:
                _fsync_files([partial])
            system.rename_new(partial, final)
        except BaseException as e:
            with suppress(OSError):
                system.unlink(partial)
            if isinstance(e, FileExistsError):
                return False
            raise
        if durable:
            _fsync_folders([*changed, final.parent])
        return True

    def get_tagged(self, path: PurePosixPath) -> tuple[bytes, str] | None:
        """See Store."""
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        return data, hashlib.sha256(data).hexdigest()

    def put_if(self, path: PurePosixPath, data: bytes, tag: str | None, durable: bool) -> bool:
        """See Store. Nothing is between the look and the rename: all who put on a condition wait for each other.

        The file of the lock stays: who removes one may take it from beneath somebody who waits for it.
        """
        if tag is None:
            return self.put_new(path, data, durable)
        with exclusive(Path(path.with_name(f".{path.name}{_LOCK}"))):
            tagged = self.get_tagged(path)
            if tagged is None or tagged[1] != tag:
                return False
            self.put(path, data, durable)
        return True

    @contextmanager
    def new_file(self, path: PurePosixPath, durable: bool) -> Iterator[Path]:
        """See Store."""
        final = Path(path)
        changed = system.make_folder(final.parent)
        partial = _partial(final)
        try:
            yield partial
            if durable:
                _fsync_files([partial])
            system.replace(partial, final)
        except BaseException:  # for example a full disk
            with suppress(OSError):
                system.unlink(partial)
            raise
        if durable:
            _fsync_folders([*changed, final.parent])

    def start_writeback(self, path: PurePosixPath) -> None:
        """See Store."""
        system.start_writeback(Path(path))

    def sync_files(self, files: Sequence[PurePosixPath], root: PurePosixPath) -> None:
        """See Store. A network file system has what another host has written once that host has closed the file."""
        paths = [path for file in files if (path := Path(file)).exists()]
        _fsync_files(paths)
        folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(root)}
        _fsync_folders(sorted(folders, key=lambda folder: len(folder.parts), reverse=True))

    def sync_all(self, paths: Sequence[PurePosixPath]) -> None:
        """See Store. A path that is not there is in the file system of the nearest folder above it."""
        folders = (_existing(Path(path)) for path in paths)
        with _timed():
            for folder in {folder.stat().st_dev: folder for folder in folders}.values():
                system.sync_file_system(folder)

    def append(self, path: PurePosixPath, data: bytes) -> None:
        """See Store."""
        system.make_folder(Path(path).parent)
        system.append(Path(path), data)

    def copy(self, source: PurePosixPath, target: PurePosixPath, share: bool) -> None:
        """`share`: a second name of the same file where the file system gives one."""
        if share:
            system.make_folder(Path(target).parent)
            # The file system has no hard links, or has reached its limit for one file.
            with suppress(OSError):
                return system.link(Path(source), Path(target))
        with self.new_file(target, durable=False) as partial:
            system.copy(Path(source), partial)

    def move(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """See Store."""
        system.replace(Path(source), Path(target))

    def make_dir(self, path: PurePosixPath) -> None:
        """See Store."""
        system.make_folder(Path(path))

    def remove(self, path: PurePosixPath) -> None:
        """See Store."""
        folder = Path(path)
        if folder.is_dir() and not folder.is_symlink():
            # A task of a killed run may still be writing there: the next call removes the rest.
            with suppress(FileNotFoundError):
                system.remove_tree(folder)
        else:
            system.unlink(folder)

    def building(self, path: PurePosixPath, token: str) -> PurePosixPath:
        """See Store."""
        return path.with_name(f".{path.name}.{token}{_PARTIAL}")

    def begin(self, path: PurePosixPath, token: str, alone: bool) -> None:
        """See Store."""
        changed = system.make_folder(Path(path).parent)
        pattern = re.compile(rf"\.{re.escape(path.name)}\.[^.]+(\.old)?\{_PARTIAL}")
        for entry in Path(path.parent).iterdir() if alone else ():
            if pattern.fullmatch(entry.name):
                _clear(entry)
        # `commit` syncs the name itself; here the new folders above it.
        _fsync_folders(changed)
        system.make_folder(Path(self.building(path, token)))

    def commit(self, path: PurePosixPath, token: str, durable: bool) -> None:
        """See Store."""
        final, partial = Path(path), Path(self.building(path, token))
        try:
            if durable:
                _fsync_tree(partial)
            left = self._take_the_name(partial, final, Path(self.building(path, f"{token}.old")))
            if durable:
                _fsync_folders([final.parent])
        except BaseException:
            _clear(partial)
            raise
        if left is not None:
            _clear(left)

    def _take_the_name(self, partial: Path, final: Path, old: Path) -> Path | None:
        """Make a filled folder the published one; where the older one is now."""
        if not final.exists():
            system.replace(partial, final)
            return None
        if system.exchange(partial, final):
            return partial
        system.replace(final, old)
        try:
            system.replace(partial, final)
        except OSError:
            system.replace(old, final)
            raise
        return old

    def unfinished(self, path: PurePosixPath) -> list[Unfinished]:
        """See Store."""
        unfinished: list[Unfinished] = []
        for entry in sorted(Path(path).iterdir()) if Path(path).is_dir() else ():
            if _is_partial(entry.name):
                with suppress(FileNotFoundError):  # its writer has published it since
                    stats = [p.stat() for p in (entry, *entry.rglob("*"))]
                    size = sum(s.st_size for s in stats if stat.S_ISREG(s.st_mode))
                    newest = max(s.st_mtime_ns for s in stats)
                    unfinished.append(
                        Unfinished(path / _final_name(entry.name), size, newest, functools.partial(_clear, entry))
                    )
        return unfinished

    def discard_unfinished(self, path: PurePosixPath) -> None:
        """See Store."""
        for left in self.unfinished(path):
            left.remove()

    def lease(self, path: PurePosixPath) -> AbstractContextManager[Lease]:
        """Take an advisory lock of the kernel, which frees it when the holder dies.

        It holds on one machine, or over NFS.
        """
        return flock_lease(Path(path))

    def holder(self, path: PurePosixPath) -> Holder | None:
        """See Store."""
        return flock_holder(Path(path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether it is one, or a link to one; a link that leads to itself is none."""
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        return False


def _walk(top: PurePosixPath, is_hidden: Callable[[str], bool]) -> Iterator[tuple[PurePosixPath, list[str]]]:
    """Yield a folder and those below it, each with the names of what is in it besides folders.

    A folder that links lead to comes once, by its own name where that is below `top`. A link to a folder above itself
    is a loop, and not followed.

    Raises:
        OSError: a folder cannot be listed; its files would seem to be gone.
    """
    seen = set[tuple[int, int]]()
    folders, links = deque([top]), deque[PurePosixPath]()
    while folders or links:
        folder = (folders or links).popleft()
        try:
            status = os.stat(folder)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                inside = {entry.name: entry for entry in entries if not is_hidden(entry.name)}
        except FileNotFoundError:  # removed since it was listed
            continue
        except NotADirectoryError:
            if folder != top:
                raise
            return
        names = sorted(inside)
        below = {name for name, entry in inside.items() if _is_folder(entry)}
        yield folder, [name for name in names if name not in below]
        for name in names:
            if name in below and not inside[name].is_symlink():
                folders.append(folder / name)
            elif name in below and not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(folder / name)):
                links.append(folder / name)


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") and name.endswith((_PARTIAL, _LOCK))


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(_PARTIAL)


def _final_name(name: str) -> str:
    """Return the NAME of `.NAME.TOKEN.partial` and `.NAME.TOKEN.old.partial`."""
    return name[1:].removesuffix(_PARTIAL).removesuffix(".old").rpartition(".")[0]


def _clear(path: Path) -> None:
    """Remove what nobody reads. What cannot be removed now goes next time."""
    with suppress(OSError):
        if path.is_dir():
            system.remove_tree(path)
        else:
            system.unlink(path)


def _fsync_tree(folder: Path) -> None:
    """Files first, then folders, inner ones first: nothing is named on the disk before it is there."""
    files: list[Path] = []
    folders: list[Path] = []
    for parent, _, names in os.walk(folder, topdown=False):
        folders.append(Path(parent))
        files.extend(Path(parent) / name for name in names)
    _fsync_files(files)
    _fsync_folders(folders)


def _fsync_files(files: Sequence[Path]) -> None:
    with _timed():
        if len(files) > 1:
            with ThreadPoolExecutor(_FSYNCS_AT_ONCE, "fsync") as pool:
                list(pool.map(system.fsync, files))
        else:
            for file in files:
                system.fsync(file)


def _fsync_folders(folders: Sequence[Path]) -> None:
    """Sync folders in this order, each once."""
    with _timed():
        for folder in dict.fromkeys(folders):
            system.fsync(folder)


@contextmanager
def _timed() -> Iterator[None]:
    """Add the seconds of the block to `sync_seconds`."""
    global _waited
    tick = time.perf_counter()
    try:
        yield
    finally:
        _waited += time.perf_counter() - tick


def _existing(path: Path) -> Path:
    """Return the path itself where it is a folder, or the nearest existing folder above it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
