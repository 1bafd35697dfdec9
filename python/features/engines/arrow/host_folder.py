"""Where each host of a cluster keeps the row groups that its tasks decode, where the hosts share no disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.features.engines.arrow.lake_file import LakeFile, prune
from headrace.storage import Location
from headrace.storage.host_scratch import HostScratch, RunFolder


@dataclass(frozen=True)
class HostFolder:
    """The row groups of one layout on each host, and what a run leaves there for its own tasks."""

    scratch: HostScratch
    #: Of the layout of the row groups.
    key: str
    run: str
    #: Keys of the files that the run reads: row groups of others go.
    files: tuple[str, ...]

    @staticmethod
    def of(scratch: HostScratch, key: str, run: str, files: Sequence[LakeFile]) -> HostFolder:
        return HostFolder(scratch, key, run, tuple(file.key for file in files))

    def here(self) -> Location:
        """The folder of the row groups on this host, which has been tidied up by the run's first task there."""
        return self.of_run().parent / self.key

    def of_run(self) -> Location:
        """A folder on this host for this run alone: the next one removes it."""
        return RunFolder(self.scratch, self.run, (self.key,)).of_run(self._prune)

    def _prune(self) -> None:
        mine = self.scratch.here() / self.key
        prune(mine, self.files)
        mine.make_dir()


def of_run_here(place: Location | HostFolder | RunFolder) -> Location:
    """A folder of a run alone: the one that all its tasks see, or this host's own."""
    return place if isinstance(place, Location) else place.of_run()
