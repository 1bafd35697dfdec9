"""Errors of file systems as users see them: something to mend, a full disk, or a file system that is away.

A store of objects says so itself (`headrace.errors.stores`), a file system by the numbers of errno(3).
Libraries that keep no number say it in the system's words: the JVM, SQLite, PostgreSQL, LMDB, safetensors.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError

_MAY_NOT = {errno.EACCES, errno.EPERM}
#: EFBIG: the largest size of a file that the process may write (`ulimit -f`).
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Errors of NFS and similar file systems whose server does not answer, or has lost the file; most also of sockets.
_AWAY = {
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EREMOTEIO,
}
#: Arrow's text before the name of a file that it cannot open or read: its errors have `errno`, but no `filename`.
_OF_ARROW = "local file '"
#: Messages of a full disk by libraries that give no `errno`, and the path in those of Java.
_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full|\bStorageFull\b")
_PATH_IN_TEXT = re.compile(r"(?:file:)?(/[^\s:'\"()]+)(?:: | \()(?:No space left on device|Disk quota exceeded)")
#: Builtin errors that C and Rust libraries raise with a system's message; others come from Python code.
_LIBRARY_ERRORS = (OSError, RuntimeError)


class DiskFull(UserError):
    """There is no room for what must be written. Another attempt may find some; exit code 75."""

    exit_code = EXIT_INCOMPLETE


def is_full(error: OSError) -> bool:
    """Return whether an error is for want of room: the file system is full, a quota or a limit of sizes is reached."""
    return error.errno in _FULL


def disk_full(error: BaseException, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return a full disk as an error of one line, or None where `error` says something else.

    Args:
        error: of Python, of a library, or of the JVM (whose stack trace is part of its text).
        folders: that the process writes to. Where the error names no path, the one with the least room is named.
    """
    if isinstance(error, OSError) and error.errno is not None:
        if not is_full(error):
            return None
        path = _PATH_IN_TEXT.search(str(error))
        name = _path_of(error) or ("" if path is None else path[1])
        return DiskFull(full_message(os.strerror(error.errno), name, folders))
    of_builtins = type(error).__module__ == "builtins" and not isinstance(error, _LIBRARY_ERRORS)
    return None if of_builtins or isinstance(error, UserError) else full_disk_in(str(error), folders)


def full_disk_in(text: str, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the full disk that a program's output tells of, or None; `folders` as of `disk_full`."""
    if (match := _FULL_TEXT.search(text)) is None:
        return None
    words = os.strerror(errno.EDQUOT if "quota" in match[0] else errno.ENOSPC)
    path = _PATH_IN_TEXT.search(text)
    return DiskFull(full_message(words, "" if path is None else path[1], folders))


def require_room(folder: Path, needed: int, user: str) -> None:
    """Raise DiskFull where fewer than `needed` bytes are free in a folder; `user` needs them, for the message."""
    place = _existing(folder)
    if _room(place)[0] < needed:
        raise DiskFull(
            f"{place}: {os.strerror(errno.ENOSPC)}: {user} needs {needed:,} bytes, and {free_in(place)}. Make room "
            f"there, then run this again"
        )


def full_message(words: str, name: str = "", folders: Sequence[Path] = ()) -> str:
    """Return the line about a full disk: the path, what the system said, the folder to make room in, the bytes free.

    Args:
        words: the system's words.
        name: the path that could not be written; empty: not known.
        folders: see `disk_full`.
    """
    places = [_existing(Path(name))] if name else [_existing(folder) for folder in folders]
    room = {place: _room(place) for place in places}
    fault = f"{name}: {words}" if name else words
    if not room:
        return f"{fault}. Make room below --home and TMPDIR, then run this again"
    folder = min(room, key=lambda place: room[place][0])
    return f"{fault}: {free_in(folder)}. Make room there, then run this again"


def free_in(folder: Path) -> str:
    """Return what a folder's file system has left for a user, as `12,288 bytes are free in /mnt/a`."""
    place = _existing(folder)
    free, inodes = _room(place)
    return f"{free:,} bytes{' and no inodes' if inodes == 0 else ''} are free in {place}"


def _existing(path: Path) -> Path:
    """Return the folder of a path, or the nearest one above it that is there."""
    folder = Path(os.path.abspath(path))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _room(folder: Path) -> tuple[int, int | None]:
    """Return bytes and inodes that a user may still take there; inodes None where the file system counts none."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None


def _path_of(error: OSError) -> str:
    if isinstance(error.filename, str):
        return error.filename
    return str(error).partition(_OF_ARROW)[2].partition("'")[0]


def told_of_file(error: OSError) -> tuple[str, int] | None:
    """Return the message and exit code of a file's error; None for other errors and for faults of the program."""
    name = _path_of(error)
    if (full := disk_full(error)) is not None:
        return str(full), full.exit_code
    if not name:
        return None
    fault = f"{name}: {os.strerror(error.errno) if error.errno else ''}"
    if error.errno in _MAY_NOT:
        return f"{fault}. The user of this process must be allowed to read and write there", EXIT_USER_ERROR
    if error.errno == errno.EROFS:
        return f"{fault}. Mount it for writing, or choose another place", EXIT_USER_ERROR
    if error.errno == errno.ENOTDIR:
        return f"{fault}. A file is where a folder should be: move it away, or choose another place", EXIT_USER_ERROR
    if error.errno in _AWAY:
        return f"{fault}. Its file system is away. Run this again later", EXIT_INCOMPLETE
    if error.errno == errno.EIO:
        return f"{fault}. Its disk, or the server of its file system, has failed: see the kernel's log", EXIT_FAILURE
    return None
