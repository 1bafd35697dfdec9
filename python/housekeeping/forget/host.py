"""What this host has of the files of a store of objects, whichever pipeline's they are."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.storage.objects import copies


def host_places(state: WorkspaceState) -> Iterator[Place]:
    """Copies of its files, and files on their way to it; none where lake and store are on file systems.

    Copies are fetched again by whoever reads the files. So they go last: whoever looks for persons fetches some.
    """
    if state.ws.is_local:
        return
    if found := copies.kept():
        note = "of all pipelines; fetched again where they are read. Other hosts have their own"
        what = f"copies in {copies.folder()}"
        yield Place("cache", what, removed=len(found), size=sum(found.values()), note=note, act=_remove)
    if found := copies.young():
        left = (
            "files on their way to the store, written to less than a day ago by stages that are at work or were "
            "killed: run the command again when no stage is at work on this host and these are removed"
        )
        for place, size in found.items():
            yield Place("cache", str(place), size=size, left=left)


def _remove() -> str:
    try:
        copies.remove_kept()
    except OSError as e:
        return f"they cannot be removed ({e.strerror}: {e.filename}): remove the folder"
    return ""
