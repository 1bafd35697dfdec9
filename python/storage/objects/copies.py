"""Files of a store as local files, for memory maps and native readers: a cache of this host, which may vanish.

A copy is named after its object's key and tag, so its content never changes. Processes of this host that ask for it at
the same time fetch it once. Copies are removed where the disk is nearly full, or where they take more than the
environment allows: first those that were released, then the least recently used. A process that has one open keeps it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace
from headrace.storage import system
from headrace.storage.lease import exclusive
from headrace.storage.objects import calls
from headrace.storage.objects.calls import Stored, crc32_of
from headrace.storage.uri import SCRATCH

#: Environment variable with the folder of copies. Default: below the scratch of this process's workspace
#: (`use_folder`); in processes without one, below their SCRATCH.
VARIABLE = "HEADRACE_CACHE"
#: Environment variable with the size limit of all copies, in GiB; default: the size of the disk.
LIMIT = "HEADRACE_CACHE_GIB"
#: Share of the disk that copies leave free.
_FREE = 0.05
#: Seconds for which a copy stays after its last use.
_KEPT_SECONDS = 600
#: Seconds without a write after which a partial file is taken for one of a killed writer.
_ABANDONED_SECONDS = 86_400
#: Characters of a copy's digest that name its lock: they bound the number of lock files, which are never removed.
_LOCK_CHARS = 3
#: Subfolders: copies of files, and folders of hard links to these.
_FILES, _FOLDERS = _COPIES = ("files", "folders")


#: The folder that `use_folder` has set; empty: none.
_workspace_folder: list[Path] = []


def use_folder(path: Path) -> None:
    """Keep this process's copies in a folder, unless its environment names one. Later calls change nothing."""
    if not _workspace_folder:
        _workspace_folder.append(path)


def folder() -> Path:
    """Return the folder of this host's copies, and of files on their way to a store.

    Raises:
        UserError: no environment variable names a folder, and the user's folder below the system's temporary folder
            belongs to another user or is a link.
    """
    named, scratch = os.environ.get(VARIABLE), os.environ.get(SCRATCH)
    if named:
        return Path(named)
    if _workspace_folder:
        return _workspace_folder[0]
    if scratch:
        return Path(scratch) / "cache"
    return _private(Path(tempfile.gettempdir()) / f"headrace-cache-{os.getuid()}")


def _private(path: Path) -> Path:
    """Return a folder that belongs to this user alone; create it where it is missing.

    Other users know its name and can write to the folder above, so a link or their folder may stand there.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    info = path.lstat()
    fault = None
    if stat.S_ISLNK(info.st_mode):
        fault = "is a symbolic link"
    elif not stat.S_ISDIR(info.st_mode):
        fault = "is no folder"
    elif info.st_uid != os.getuid():
        fault = f"belongs to another user ({info.st_uid})"
    if fault is not None:
        raise UserError(f"{path}, for files of stores, {fault}: remove it, or name a folder of yours in {SCRATCH}")
    if stat.S_IMODE(info.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def new_path(name: str) -> Path:
    """Return a path for a file on its way to the store, in its own folder, so that it has its final name."""
    place = folder() / "new" / uuid.uuid4().hex
    system.make_folder(place)
    return place / name


def drop(path: Path) -> None:
    """Remove a file of `new_path` and its folder."""
    _remove_quietly(path.parent)


def abandoned_uploads() -> dict[Path, int]:
    """Return the folders of `new_path` that nobody has written to for a day, and their bytes: the writer was killed."""
    limit = time.time() - _ABANDONED_SECONDS
    return {place: size for place, written, size in _uploads() if written < limit}


def recent_uploads() -> dict[Path, tuple[int, float]]:
    """Return the folders of `new_path` whose writers are at work, or were killed less than a day ago.

    Returns:
        by folder: its bytes, and the time (seconds since 1970) from which it counts as abandoned, without more writes.
    """
    limit = time.time() - _ABANDONED_SECONDS
    places = _uploads()
    return {place: (size, written + _ABANDONED_SECONDS) for place, written, size in places if written >= limit}


def _uploads() -> Iterator[tuple[Path, float, int]]:
    """Yield the folders of `new_path`, the time of each one's last write (seconds since 1970), and its bytes."""
    for place in sorted((folder() / "new").glob("*")):
        with suppress(FileNotFoundError):  # its writer has published it since
            stats = [p.stat() for p in (place, *place.rglob("*"))]
            yield place, max(s.st_mtime for s in stats), sum(s.st_size for s in stats if stat.S_ISREG(s.st_mode))


def remove_abandoned_uploads() -> None:
    """Remove the folders of `abandoned_uploads`; the writers of `recent_uploads` may still be at work."""
    for place in abandoned_uploads():
        _remove_quietly(place)


def cached_files() -> dict[Path, int]:
    """Return all files of this host's copies and their bytes; files of killed fetches are among them."""
    sizes = dict[Path, int]()
    for part in _COPIES:
        for path in sorted((folder() / part).rglob("*")):
            with suppress(FileNotFoundError):  # another process was first
                info = path.stat()
                if stat.S_ISREG(info.st_mode):
                    sizes[path] = info.st_size
    return sizes


def remove_cached_files() -> None:
    """Remove all copies, recently used ones too. A process that has one open keeps it.

    Raises:
        OSError: a copy cannot be removed.
    """
    for old in (folder() / _FOLDERS).glob("*"):
        with suppress(FileNotFoundError):  # another process was first
            _remove_at_once(old)
    for old in (folder() / _FILES).glob("*"):
        # The lock keeps other processes from fetching it meanwhile.
        with exclusive(folder() / "locks" / old.name[:_LOCK_CHARS]), suppress(FileNotFoundError):
            system.remove_tree(old)


def file(bucket: Any, store: str, stored: Stored) -> Path:
    """Return a local file with an object's content.

    Args:
        bucket: the object's bucket.
        store: the bucket's name among all stores.
        stored: the object.

    Raises:
        FileNotFoundError: the object does not exist any more.
        ChangedInPlace: the object has another tag or size than `stored`.
    """
    digest = hashlib.sha256(f"{store}\n{stored.key}\n{stored.tag}\n{stored.size}".encode()).hexdigest()[:32]
    path = folder() / _FILES / digest / stored.key.rsplit("/", 1)[-1]
    if _touch_existing(path):
        return path
    with exclusive(folder() / "locks" / digest[:_LOCK_CHARS]):
        if _touch_existing(path):  # another process has fetched it meanwhile
            return path
        _make_room(path, stored.size)
        system.make_folder(path.parent)
        partial = path.parent / f"{uuid.uuid4().hex}.partial"
        try:
            got = calls.download(bucket, stored.key, partial)
            if (got.tag, got.size, partial.stat().st_size) != (stored.tag, stored.size, stored.size):
                raise ChangedInPlace(
                    f"{store}/{stored.key} is not the file that was looked for: it was changed in place"
                )
            if stored.crc32 is not None:
                stored.check(f"{store}/{stored.key}", crc32_of(partial))
            system.replace(partial, path)
        finally:
            system.unlink(partial)
    return path


def release(path: Path) -> None:
    """Mark a copy as not needed soon: it is among the first to be removed for another. A later request clears that."""
    if path.is_relative_to(folder() / _FILES):
        with suppress(FileNotFoundError):
            os.utime(path, (0, 0))


def _touch_existing(path: Path) -> bool:
    """Return whether the copy exists; if so, note its use, which keeps it for `_KEPT_SECONDS`."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def tree(bucket: Any, store: str, files: Mapping[str, Stored]) -> Path:
    """Return a local folder of files, by their paths in it."""
    listing = "\n".join(f"{name}\t{f.key}\t{f.tag}" for name, f in sorted(files.items()))
    final = folder() / _FOLDERS / hashlib.sha256(f"{store}\n{listing}".encode()).hexdigest()[:32]
    with suppress(FileNotFoundError):
        os.utime(final)
        return final
    building = new_path("folder")
    try:
        system.make_folder(building)
        for name, stored in files.items():
            system.make_folder((building / name).parent)
            system.link(file(bucket, store, stored), building / name)
        system.make_folder(final.parent)
        try:
            system.replace(building, final)
        except OSError:
            if not final.is_dir():  # another process was first
                raise
    finally:
        drop(building)
    return final


def _make_room(path: Path, size: int) -> None:
    """Remove copies that nobody has used lately until there is room for `size` bytes more, or none is left."""
    root = folder()
    system.make_folder(root)
    usage = shutil.disk_usage(root)
    needed = size + int(usage.total * _FREE) - usage.free
    limit = _limit()
    if limit is not None:
        taken = sum(stat.st_size for stat, _ in _files(root))
        needed = max(needed, taken + size - limit)
    if needed <= 0:
        return
    remove_abandoned_uploads()
    oldest = time.time() - _KEPT_SECONDS
    for old in (root / _FOLDERS).glob("*"):
        with suppress(FileNotFoundError):  # another process was first
            if old.stat().st_mtime < oldest:
                _remove_at_once(old)
    copies = [(info, p) for info, p in _files(root) if p != path]
    for info, old in sorted(copies, key=lambda f: f[0].st_mtime):
        if needed <= 0 or info.st_mtime > oldest:
            return
        if info.st_nlink > 1:  # a remaining folder links to it: removing it would free nothing
            continue
        system.unlink(old)
        needed -= info.st_size


def _files(root: Path) -> Iterator[tuple[os.stat_result, Path]]:
    """Yield the existing copies; others may be removing some."""
    for path in (root / _FILES).glob("*/*"):
        with suppress(FileNotFoundError):
            yield path.stat(), path


def _limit() -> int | None:
    """Return the bytes that copies may take; None: no limit but the disk's size.

    Raises:
        UserError: the environment variable is not a number above 0.
    """
    text = os.environ.get(LIMIT)
    if not text:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise UserError(f"{LIMIT} is '{text}': write a number of GiB above 0")
    return int(gib * (1 << 30))


def _remove_at_once(tree: Path) -> None:
    """Remove a folder in one step: other processes see all of it or nothing."""
    moved = new_path("removed")
    try:
        system.replace(tree, moved)
    finally:
        drop(moved)


def _remove_quietly(tree: Path) -> None:
    with suppress(OSError):
        system.remove_tree(tree)
