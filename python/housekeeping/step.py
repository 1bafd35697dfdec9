"""One thing that can go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.stage import RunLock
from headrace.storage import Location


@dataclass(frozen=True)
class Step:
    """What `headrace gc` can do to one thing. Doing it twice is the same as doing it once."""

    #: dataset, model, checkpoints, log, report, search, unfinished, staged, decoded, mapped, rows, compaction, vacuum,
    #: history, published, manifests, registry.
    kind: str
    #: A path below the workspace, or a name that people know.
    what: str
    #: Why it can go.
    reason: str
    #: Bytes that it takes; 0 where nobody can say.
    size: int = 0
    #: Does it.
    act: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)


def size_of(place: Location) -> int:
    """Bytes of a file, or of all files below a folder, those of unfinished writes left out; 0 where there is nothing.

    Files may go meanwhile.
    """
    if place.is_file():
        return _size(place)
    return sum(_size(f) for f in place.files())


def newest_write_ns(place: Location) -> int:
    """Return when a file, or anything below a folder, was last written, made or removed: nanoseconds since 1970.

    Of folders on file systems their own times count, too: one without files may have been made just now. 0 in a store
    where there is no file.
    """
    if place.scheme != "file" or place.is_file():
        files = [place] if place.is_file() else list(place.files())
        return max((f.info().modified_ns for f in files), default=0)
    newest = 0
    for folder, _, names in os.walk(place.local_path()):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            with suppress(FileNotFoundError):  # it may go meanwhile
                newest = max(newest, path.lstat().st_mtime_ns)
    return newest


def remove_all(places: Sequence[Location], lock: RunLock | None = None) -> None:
    """Remove them; what is gone already is none of them.

    Raises:
        LeaseLost: another process is at work by now; those that are left stay.
    """
    for place in places:
        if lock is not None:
            lock.check_again()
        place.remove()


def _size(file: Location) -> int:
    try:
        return file.size()
    except FileNotFoundError:
        return 0
