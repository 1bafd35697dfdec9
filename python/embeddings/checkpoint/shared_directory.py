"""A folder that all ranks write and that appears as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.comm.base import Collective
from headrace.storage import local

#: Names the place that all ranks fill; one save at a time goes on in a folder.
_TOKEN = "shared"


@contextmanager
def shared_directory(final: Path, collective: Collective) -> Iterator[Path]:
    """A folder that all ranks fill and that appears as `final` in one step: `Location.new_folder` for many ranks.

    Collective: every rank enters and leaves. The chief makes the folder and, when all ranks have left the block well,
    flushes and renames it; an earlier `final` is replaced. What a killed attempt left behind is removed on entry.
    The ranks must share a file system.
    """
    place = local(final)
    if collective.world.is_chief:
        place.begin(_TOKEN)
    collective.barrier()
    yield place.building(_TOKEN).local_path()
    collective.barrier()
    if collective.world.is_chief:
        place.commit(_TOKEN)
    collective.barrier()
