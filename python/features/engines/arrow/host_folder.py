"""Where each host of a cluster keeps the row groups that its tasks decode, where the hosts share no disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.features.engines.arrow.lake_file import LakeFile, prune
from headrace.storage import Location, local
from headrace.storage.once import made_once

#: What a run has for itself: its folder beside those of decoded row groups begins so.
RUN = "scratch."


@dataclass(frozen=True)
class HostScratch:
    """A folder of a host's own, in terms that are the same on all hosts. Pickled into tasks."""

    #: Its path in the host's scratch folder.
    below: str
    #: The scratch folder that the pipeline names, on every host. None: HEADRACE_SCRATCH of the executor's own
    #: environment, else the folder that Spark gave the executor, which goes with it.
    folder: Location | None = None

    def here(self) -> Location:
        """The folder on this host."""
        named = os.environ.get("HEADRACE_SCRATCH")
        of_spark = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
        root = self.folder or local(named or of_spark or tempfile.gettempdir())
        return root.transient() / self.below


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
        home = self.scratch.here()
        return made_once(home / f"{RUN}{self.run}", lambda _: self._tidy(home))

    def _tidy(self, home: Location) -> None:
        """Remove what earlier runs left and this one does not need. Other tasks of the run on this host wait."""
        for other in home.entries():
            if other.name != self.key and not other.name.startswith(f"{RUN}{self.run}"):
                other.remove_quietly()
        prune(home / self.key, self.files)
        (home / self.key).make_dir()
