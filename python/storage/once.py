"""Folders that many processes of a host want, and one of them makes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from headrace.storage.lease import Held
from headrace.storage.location import Location, not_as_written

_LOG = logging.getLogger("headrace.storage")
_POLL_SECONDS = 0.05


def made_once(folder: Location, make: Callable[[Location], None]) -> Location:
    """Return the folder, made by this process or by the first of several; it appears when it is complete.

    A process that dies while it makes the folder leaves none, and the next one makes it.

    Args:
        folder: named after its contents: one that is there is taken as it is, if its files have their sizes.
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
