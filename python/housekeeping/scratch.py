"""What runs leave behind when they are killed, and what is made again where it is missing."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.housekeeping.step import Step, newest_write_ns, size_of
from headrace.housekeeping.workspace_state import WorkspaceState, is_at_work
from headrace.lake.handed_on import HANDING, STAGE_FOLDERS
from headrace.storage import Location


def scratch_steps(state: WorkspaceState) -> Iterator[Step]:
    """Temporary files of this pipeline's stages, on this host and in the lake, and of Spark where none is at work."""
    ws, mine = state.ws, state.pipeline
    temporary = ws.spark_local
    places = [temporary / kind / mine for kind in STAGE_FOLDERS]
    places += [ws.handed_on(mine, stage, own=True) for stage in HANDING]
    places += [e for e in (temporary / "prepared").entries() if e.name.startswith(f"{mine}-")]
    others = (name for name in ws.pipelines() if name != mine)
    if not any(is_at_work(ws, name) for name in (*others, *(f"{n}-search" for n in ws.pipelines()))):
        places += (temporary / "local").entries()
    yield from _idle(state, "unfinished", places, "a run that has ended left it")


def decoded_steps(state: WorkspaceState) -> Iterator[Step]:
    """Decoded files of the lake, where no features have been made for long."""
    yield from _idle(state, "decoded", [state.ws.encoded(state.pipeline)], "it is made again where it is missing")


def _idle(state: WorkspaceState, kind: str, places: list[Location], why: str) -> Iterator[Step]:
    before = state.before_ns(state.keep.unfinished_days)
    for place in places:
        if place.exists() and newest_write_ns(place) < before:
            reason = f"{why}; not written for {state.keep.unfinished_days:g} days"
            yield Step(kind, state.ws.name_of(place), reason, size_of(place), place.remove)
