"""What hosts have for themselves: this one's copies of a store's files, whichever pipeline's they are; other hosts'."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

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
    for place, (size, until) in copies.young().items():
        left = (
            f"files on their way to the store, written to less than a day ago by a stage that is at work or killed: "
            f"the same command removes them from {datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S} UTC on; or "
            f"remove them now, if no stage is at work on this host, and run it again"
        )
        yield Place("cache", str(place), size=size, left=left, later=True)


def other_hosts(state: WorkspaceState) -> Iterator[Place]:
    """What tasks have left on hosts that share no scratch folder, and nobody but these can remove."""
    if state.spec.spark.own_scratch:
        scratch = state.ws.scratch_folder or "their scratch folder (HEADRACE_SCRATCH, or the one that Spark gives them)"
        note = (
            f"not reached: remove the first two below {scratch} on every host that has ever had tasks, and there "
            f"HEADRACE_CACHE, or {scratch}/cache"
        )
        what = f"encoded/{state.pipeline}, mapped/{state.pipeline} and copies of the store's files on other hosts"
        yield Place("cache", what, note=note)


def _remove() -> str:
    try:
        copies.remove_kept()
    except OSError as e:
        return f"they cannot be removed ({e.strerror}: {e.filename}): remove the folder"
    return ""
