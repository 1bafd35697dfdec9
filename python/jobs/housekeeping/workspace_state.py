"""State of a pipeline's workspace (its manifests, which of its days are kept), and the steps of housekeeping."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import cached_property
from pathlib import Path

from headrace.config import Housekeeping, Spec
from headrace.config.workspace import Workspace
from headrace.stage import RunLock
from headrace.stage.manifest import Manifest
from headrace.storage import Fence, Location


@dataclass(frozen=True)
class CleanupStep:
    """Removal of one thing by `headrace gc`. Doing it twice is the same as doing it once."""

    #: dataset, model, checkpoints, log, report, output, search, unfinished, staged, decoded, mapped, rows, compaction,
    #: vacuum, history, published, manifests, registry.
    kind: str
    #: A path below the workspace, or a name for messages.
    name: str
    #: Why it can go.
    reason: str
    #: Size in bytes; 0: unknown.
    size: int = 0
    #: Removes it.
    act: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)


def size_of(place: Location) -> int:
    """Return bytes of a file, or of all files below a folder, those of unfinished writes left out; 0 where there is
    nothing.

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
            with suppress(FileNotFoundError):  # it may be removed meanwhile
                newest = max(newest, path.lstat().st_mtime_ns)
    return newest


def remove_all(places: Sequence[Location], lock: RunLock | None = None) -> None:
    """Remove files and folders; missing ones are skipped.

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


@dataclass(frozen=True)
class WorkspaceState:
    """State of a pipeline's workspace. Each call reads the manifests again: a step may have changed one."""

    spec: Spec
    ws: Workspace
    #: Current time, for ages of files.
    now: datetime
    #: Lock of the pipeline; None: nothing is changed.
    lock: RunLock | None = None

    @property
    def pipeline(self) -> str:
        return self.spec.pipeline

    @property
    def fence(self) -> Fence | None:
        """Return the token that commits carry; None: nothing is changed."""
        return self.lock.fence if self.lock else None

    def check_lease(self) -> None:
        """Check the lease before a write without a token. Raises LeaseLost where another process is at work by now."""
        if self.lock is not None:
            self.lock.check()

    @property
    def keep(self) -> Housekeeping:
        return self.spec.housekeeping

    @cached_property
    def newest_day(self) -> str | None:
        """Return the newest day of which a stage has run; None where none has."""
        return max(self.ws.days(self.pipeline), default=None)

    def first_day(self, days: int | None) -> str:
        """Return the first of so many days up to the newest one; "" where all are kept, or none has run."""
        if days is None or self.newest_day is None:
            return ""
        return (date.fromisoformat(self.newest_day) - timedelta(days=days - 1)).isoformat()

    def manifests(self) -> Iterator[tuple[Location, Manifest]]:
        """Yield all manifests of the pipeline and their files, of stages outside of a day, too.

        Raises:
            UserError: a file among them is no manifest; then nothing may be removed.
        """
        yield from manifests_of(self.ws, self.pipeline)

    def note_removed(self, day: str, names: Collection[str], by: str = "retention") -> None:
        """Note in the day's manifests that name one of these as an output that it is removed. Before its files go."""
        for file, manifest in manifests_of(self.ws, self.pipeline, [day]):
            noted = manifest.with_removed(names, by)
            if noted is not manifest:
                self.save(noted, file)

    def save(self, manifest: Manifest, file: Location) -> None:
        """Replace a manifest. Raises LeaseLost where another process is at work by now."""
        manifest.save(file, self.lock.fences if self.lock else ())

    def before_ns(self, days: float) -> int:
        """Return the moment so many days ago, nanoseconds since 1970."""
        return int((self.now - timedelta(days=days)).timestamp() * 1e9)


def manifests_of(
    ws: Workspace, pipeline: str, days: Sequence[str] | None = None
) -> Iterator[tuple[Location, Manifest]]:
    """Yield all manifests of a pipeline (of some of its days) and their files, oldest day first."""
    for day in ws.days(pipeline) if days is None else days:
        for file in (ws.runs(pipeline) / day).entries():
            if file.suffix == ".json" and (manifest := Manifest.load(file)) is not None:
                yield file, manifest


def others_at_work(ws: Workspace, pipeline: str) -> bool:
    """Return whether a stage or a search is at work now in this home, but for a pipeline's own stages.

    Of a pipeline without a manifest, too: its first run is at work before there is one.
    """
    own_locks = set(ws.locks(pipeline))
    locks = (lock for lock in ws.locks(pipeline)[0].parent.entries() if lock.suffix == ".lock")
    return any(lock not in own_locks and lock.holder() is not None for lock in locks)


def is_at_work(ws: Workspace, pipeline: str) -> bool:
    """Return whether a stage of a pipeline is at work now."""
    return any(lock.holder() is not None for lock in ws.locks(pipeline))
