"""Calls of the operating system that change a disk. Each may fail, and a process may be killed between any two.

Tests replace them to fail the n-th call (tests/unit/test_storage_faults.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_SYNC_FILE_RANGE_WRITE = 2
#: Errors of kernels and file systems that lack the rename.
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents where they are not there; return the folders whose entries changed, outer first."""
    missing = [path]
    while not missing[-1].exists() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    path.mkdir(parents=True, exist_ok=True)
    return missing[:0:-1]


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a new file. A reader of `path` may see a part of it."""
    with open(path, "xb") as f:
        f.write(data)


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing."""
    return open(path, "xb")


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, by one call of write(2): lines of two writers do not mix. Made where it is missing."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def fsync(path: Path) -> None:
    """Have a file's contents, or a folder's entries, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(path: Path) -> None:
    """Have all that anybody has written to the file system of `path` survive a power cut, programs of Java included."""
    call = _syncfs()
    if call is None:
        os.sync()
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        if call(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def start_writeback(path: Path) -> None:
    """Let the kernel begin to write a file to the disk: a later `fsync` waits for less. Promises nothing."""
    call = _sync_file_range()
    if call is None:
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        call(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # a hint to the kernel: errors do not matter
    finally:
        os.close(fd)


def replace(source: Path, target: Path) -> None:
    """Rename in one step; a file at `target` is replaced, a folder there must be empty."""
    os.replace(source, target)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file in one step. Raises FileExistsError where there is something at `target`."""
    call = _renameat2()
    if call is not None:
        if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _UNKNOWN:
            raise OSError(number, os.strerror(number), str(source), None, str(target))
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS repeats a link whose answer was lost, and then finds the link that it made.
        if not source.samefile(target):
            raise
    source.unlink()


def exchange(a: Path, b: Path) -> bool:
    """Give two folders each other's name in one step. False: this file system cannot; nothing has changed."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def link(source: Path, target: Path) -> None:
    """Give a file a second name, which must not exist."""
    os.link(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file, with its times."""
    shutil.copy2(source, target)


def unlink(path: Path) -> None:
    """Remove a file; it may be gone already."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder with all below it; files may go meanwhile, or be made by others: then it may stay."""
    shutil.rmtree(path)


@cache
def _renameat2() -> Any:
    """renameat2(2) of the C library; None where it has none."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call


@cache
def _syncfs() -> Any:
    """syncfs(2) of the C library; None where it has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None) if sys.platform == "linux" else None
    if call is not None:
        call.argtypes = [ctypes.c_int]
    return call


@cache
def _sync_file_range() -> Any:
    """sync_file_range(2) of the C library; None where it has none."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
