"""A pipeline's manifests, and which of its days are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cached_property

from headrace.config import Housekeeping, Spec
from headrace.manifest import Manifest
from headrace.stage import RunLock
from headrace.storage import Fence, Location
from headrace.workspace import Workspace


@dataclass(frozen=True)
class WorkspaceState:
    """What housekeeping looks at. Manifests are read anew by each who asks: a step may have changed one."""

    spec: Spec
    ws: Workspace
    #: The clock, for ages of files.
    now: datetime
    #: That nobody else is at work; None: nothing is changed.
    lock: RunLock | None = None

    @property
    def pipeline(self) -> str:
        return self.spec.pipeline

    @property
    def fence(self) -> Fence | None:
        """What commits carry; None: nothing is changed."""
        return self.lock.fence if self.lock else None

    def check_lease(self) -> None:
        """Right before what carries no token. Raises LeaseLost where another process is at work by now."""
        if self.lock is not None:
            self.lock.check()

    @property
    def keep(self) -> Housekeeping:
        return self.spec.housekeeping

    @cached_property
    def newest_day(self) -> str | None:
        """The newest day of which a stage has run; None where none has."""
        return max(self.ws.days(self.pipeline), default=None)

    def first_day(self, days: int | None) -> str:
        """The first of so many days up to the newest one; before all days where all are kept, or none has run."""
        if days is None or self.newest_day is None:
            return ""
        return (date.fromisoformat(self.newest_day) - timedelta(days=days - 1)).isoformat()

    def manifests(self) -> Iterator[tuple[Location, Manifest]]:
        """All manifests of the pipeline and their files, of stages outside of a day, too.

        Raises:
            UserError: a file among them is no manifest; then nothing may be removed.
        """
        yield from manifests_of(self.ws, self.pipeline)

    def note_removed(self, day: str, names: Collection[str], by: str = "retention") -> None:
        """Note in the day's manifests that name one of these as an output that it is removed. Before its files go."""
        for file, manifest in manifests_of(self.ws, self.pipeline, [day]):
            noted = manifest.without(names, by)
            if noted is not manifest:
                self.save(noted, file)

    def save(self, manifest: Manifest, file: Location) -> None:
        """Write a manifest that is there anew. Raises LeaseLost where another process is at work by now."""
        manifest.save(file, self.lock.fences if self.lock else ())

    def before_ns(self, days: float) -> int:
        """The moment so many days ago, nanoseconds since 1970."""
        return int((self.now - timedelta(days=days)).timestamp() * 1e9)


def manifests_of(
    ws: Workspace, pipeline: str, days: Sequence[str] | None = None
) -> Iterator[tuple[Location, Manifest]]:
    """All manifests of a pipeline (of some of its days) and their files, oldest day first."""
    for day in ws.days(pipeline) if days is None else days:
        for file in (ws.runs(pipeline) / day).entries():
            if file.suffix == ".json" and (manifest := Manifest.load(file)) is not None:
                yield file, manifest


def others_at_work(ws: Workspace, pipeline: str) -> bool:
    """Whether a stage or a search is at work now in this home, but for a pipeline's own stages.

    Of a pipeline without a manifest, too: its first run is at work before there is one.
    """
    mine = set(ws.locks(pipeline))
    locks = (lock for lock in ws.locks(pipeline)[0].parent.entries() if lock.suffix == ".lock")
    return any(lock not in mine and lock.holder() is not None for lock in locks)


def is_at_work(ws: Workspace, pipeline: str) -> bool:
    """Whether a stage of a pipeline is at work now."""
    return any(lock.holder() is not None for lock in ws.locks(pipeline))
