"""What runs leave behind when they are killed, and what is made again where it is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.housekeeping.step import Step, newest_write_ns, size_of
from headrace.housekeeping.workspace_state import WorkspaceState, others_at_work
from headrace.lake.handed_on import HANDING, STAGE_FOLDERS
from headrace.storage import Location
from headrace.storage.flock import HeldFolder
from headrace.workspace import Workspace


def scratch_steps(state: WorkspaceState) -> Iterator[Step]:
    """Temporary files of this pipeline's stages, on this host and in the lake, and of Spark's processes that ended."""
    ws, mine = state.ws, state.pipeline
    places = [ws.spark_local / kind / mine for kind in STAGE_FOLDERS]
    places += [ws.handed_on(mine, stage, own=True) for stage in HANDING]
    places += [e for e in (ws.spark_local / "prepared").entries() if e.name.startswith(f"{mine}-")]
    yield from _idle(state, "unfinished", places, "a run that has ended left it")
    yield from _idle(state, "unfinished", _of_no_process(ws, mine), "a process that has ended left it")


def _of_no_process(ws: Workspace, pipeline: str) -> Iterator[Location]:
    """Spark's temporary files that no live process of this host holds."""
    entries = (ws.spark_local / "local").entries()
    names = {entry.name for entry in entries}
    # Of what has no lock beside it nobody knows the process: it may be that of any run in this home.
    is_quiet = not others_at_work(ws, pipeline)
    for entry in entries:
        path = entry.local_path()
        if HeldFolder.is_held(path):
            continue
        has_lock = f"{entry.name}.lock" in names or HeldFolder.is_lock(path)
        if has_lock or is_quiet:
            yield entry


def decoded_steps(state: WorkspaceState) -> Iterator[Step]:
    """Decoded files of the lake, where no features have been made for long."""
    yield from _idle(state, "decoded", [state.ws.encoded(state.pipeline)], "it is made again where it is missing")


def _idle(state: WorkspaceState, kind: str, places: Iterable[Location], why: str) -> Iterator[Step]:
    before = state.before_ns(state.keep.unfinished_days)
    for place in places:
        if place.exists() and newest_write_ns(place) < before:
            reason = f"{why}; not written for {state.keep.unfinished_days:g} days"
            yield Step(kind, state.ws.name_of(place), reason, size_of(place), place.remove)
