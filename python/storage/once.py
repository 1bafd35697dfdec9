"""Folders that many processes of a host want, and one of them makes."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.storage.lease import Held
from headrace.storage.location import Location

_POLL_SECONDS = 0.05


def made_once(folder: Location, make: Callable[[Location], None]) -> Location:
    """The folder, made by this process or by another one that was first; it appears when it is whole.

    A process that dies while it makes the folder leaves none, and the next one makes it.

    Args:
        folder: named after its contents: one that is there is taken as it is.
        make: fills an empty folder, which becomes `folder`.
    """
    while not folder.is_dir():
        try:
            with (folder.parent / f"{folder.name}.lock").lease():
                if not folder.is_dir():
                    with folder.new_folder() as building:
                        make(building)
        except Held:
            time.sleep(_POLL_SECONDS)
    return folder
