"""Writing files and folders so that a reader sees all of it or nothing."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Make a rename inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:  # a full disk, above all
        partial.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Give an empty folder to fill; rename it to `final` when the block ends well, remove it when it fails.

    What an earlier, killed attempt left behind (`.NAME.*.partial`) is removed first. A complete `final` is replaced:
    callers that want to keep one look for it before. One writer at a time is the caller's to ensure (the run lock).
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(f".{final.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = final.parent / f".{final.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    fsync_dir(final.parent)
