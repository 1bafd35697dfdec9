"""Folders of a host: made once by one of many processes, and of each host's own where hosts share no disk.

The latter are named on the driver and found in tasks.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headrace.storage.lease import Held
from headrace.storage.location import Location, local, not_as_written
from headrace.storage.uri import SCRATCH

_LOG = logging.getLogger("headrace.storage")
_POLL_SECONDS = 0.05


def create_once(folder: Location, make: Callable[[Location], None]) -> Location:
    """Return the folder, created by the first process that needs it; it appears when it is complete.

    A process that dies meanwhile leaves no folder, and the next process creates it.

    Args:
        folder: named after its contents; an existing one is used if its files have their sizes.
        make: fills an empty folder, which becomes `folder`.
    """
    while _fault(folder) is not None:
        try:
            with (folder.parent / f"{folder.name}.lock").lease():
                if (fault := _fault(folder)) is None:
                    break
                if fault:
                    _LOG.warning("%s: %s is made again", fault, folder)
                with folder.new_folder() as building:
                    make(building)
                    sizes = {name: info.size for name, info in building.infos().items()}
                    _sizes_of(folder).put_text(json.dumps(sizes))
        except Held:
            time.sleep(_POLL_SECONDS)
    return folder


def _fault(folder: Location) -> str | None:
    """Return why a folder must be made: empty where there is none, else the file that differs; None: complete."""
    if not folder.is_dir():
        return ""
    try:
        sizes = json.loads(_sizes_of(folder).read_text())
        return not_as_written({folder / name: int(size) for name, size in sizes.items()})
    except (FileNotFoundError, ValueError, AttributeError):
        return f"{_sizes_of(folder)} is missing or damaged"


def _sizes_of(folder: Location) -> Location:
    """Return the file with the sizes of the folder's files, by path.

    Processes map these files, and a short one would end them.
    """
    return folder.parent / f"{folder.name}=sizes"


#: Prefix of a run's own folder, beside the folders that outlive the run.
RUN = "scratch."
#: Prefix of a workspace's own folder, in a scratch folder that several workspaces may share.
OF_WORKSPACE = "workspace."


@dataclass(frozen=True)
class HostScratch:
    """A folder of a host's own, in terms that are the same on all hosts. Pickled into tasks."""

    #: Path below the host's scratch folder.
    below: str
    #: The scratch folder that the pipeline names, on every host. None: HEADRACE_SCRATCH of the executor's own
    #: environment, else the folder that Spark gave the executor, which goes with it.
    folder: Location | None = None
    #: Whether files are fsynced before they appear: later runs reuse them, so they must survive a power cut whole.
    durable: bool = False

    def resolve(self) -> Location:
        """Return the folder on this host."""
        named = os.environ.get(SCRATCH)
        of_spark = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
        root = self.folder or local(named or of_spark or tempfile.gettempdir())
        return (root if self.durable else root.transient()) / self.below


@dataclass(frozen=True)
class RunFolder:
    """A folder of each host's own of which a run says what may stay. Pickled into tasks."""

    scratch: HostScratch
    #: Name of this run among all runs.
    run: str
    #: Names to keep in the folder: the run's first task on a host removes all others.
    keep: tuple[str, ...]

    def resolve(self) -> Location:
        """Return the folder on this host, after its cleanup."""
        return self.of_run().parent

    def of_run(self, tidy: Callable[[], None] | None = None) -> Location:
        """Return a folder in it for this run alone, which the next run removes. `tidy` is called once a host."""
        home = self.scratch.resolve()

        def make(_: Location) -> None:
            self._remove_others(home)
            if tidy is not None:
                tidy()

        return create_once(home / f"{RUN}{self.run}", make)

    def _remove_others(self, home: Location) -> None:
        """Remove what earlier runs left and this one does not need. Other tasks of the run on this host wait."""
        for entry in home.entries():
            if entry.name not in self.keep and not entry.name.startswith(f"{RUN}{self.run}"):
                entry.remove_quietly()


#: A folder that all tasks share, or one of each host's own.
HostPlace: TypeAlias = Location | HostScratch | RunFolder


def on_this_host(place: HostPlace) -> Location:
    """Return the folder that a place stands for in this process."""
    return place if isinstance(place, Location) else place.resolve()
