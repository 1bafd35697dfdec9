"""A folder that all ranks write and that appears as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.comm.base import Collective
from headrace.storage import Location

#: Names the place that all ranks fill; one save at a time goes on in a folder.
TOKEN = "shared"


@contextmanager
def shared_directory(final: Location, collective: Collective) -> Iterator[Location]:
    """A folder that all ranks fill and that appears as `final` in one step: `Location.new_folder` for many ranks.

    Collective: every rank enters and leaves. The chief makes the folder and, when all ranks have left the block well,
    flushes and renames it; an earlier `final` is replaced. What a killed attempt left behind is removed on entry.
    The ranks must share a file system.
    """
    if collective.world.is_chief:
        final.begin(TOKEN)
    collective.barrier()
    yield final.building(TOKEN)
    collective.barrier()
    if collective.world.is_chief:
        final.commit(TOKEN)
    collective.barrier()
