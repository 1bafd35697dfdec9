"""Files and folders that were being written when their writer was killed: no reader sees them, and they take room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from headrace.housekeeping.models import REGISTERED_SUFFIXES
from headrace.housekeeping.step import Step
from headrace.housekeeping.workspace_state import WorkspaceState, is_at_work
from headrace.publish.target import table_name
from headrace.storage import Location
from headrace.storage.objects.copies import abandoned, remove_abandoned
from headrace.storage.store import Unfinished


def unfinished_steps(state: WorkspaceState) -> Iterator[Step]:
    """Those in lake and store that nobody has written to for long, and this host's on their way to a store.

    Of the pipeline, whose lock whoever removes them holds; of its searches where none is at work.
    """
    for folder, left in _old(state, chain(_in(_folders(state)), _without_lock(state))):
        name = f"{state.ws.name_of(folder)}/{left.path.name}"
        reason = f"its writer was killed; not written for {state.keep.unfinished_days:g} days"
        yield Step("unfinished", name, reason, left.size, left.remove)
    if not state.ws.is_local and (on_their_way := abandoned()):
        reason = "their writers were killed; not written for a day"
        yield Step(
            "unfinished",
            f"{len(on_their_way)} uploads of this host",
            reason,
            sum(on_their_way.values()),
            remove_abandoned,
        )


def discard_unfinished(state: WorkspaceState) -> None:
    """Remove those of lake and store, however young. Under the pipeline's lock.

    Of landing files, promotions and stopped arms those go that are old: who writes such does not hold that lock.
    Of this host's on their way to a store those go that nobody has written to for a day: all pipelines have one folder
    for them, and no lock says who is at work there.
    """
    remove_abandoned()
    # What is staged belongs to runs that have ended; `headrace gc` removes all of it.
    folders = chain(_folders(state), _below(state.ws.staging(state.pipeline), 3))
    for _, left in chain(_in(folders), _old(state, _without_lock(state))):
        left.remove()


def _old(state: WorkspaceState, found: Iterable[tuple[Location, Unfinished]]) -> Iterator[tuple[Location, Unfinished]]:
    before = state.before_ns(state.keep.unfinished_days)
    return ((folder, left) for folder, left in found if left.modified_ns < before)


def _in(folders: Iterable[Location]) -> Iterator[tuple[Location, Unfinished]]:
    return ((folder, left) for folder in folders for left in folder.unfinished())


def _without_lock(state: WorkspaceState) -> Iterator[tuple[Location, Unfinished]]:
    """Those in folders that are written to by who does not hold the pipeline's lock."""
    ws = state.ws
    landing = ws.landing(state.pipeline)
    stopped = ws.stopped_arm(state.pipeline, "x", "x").parent.parent
    yield from _in(chain(_below(landing, 1), _below(landing / "late", 1), _below(stopped, 1)))
    # Pipelines share this folder.
    files = {ws.promotions(state.pipeline + suffix).name for suffix in REGISTERED_SUFFIXES}
    promotions = ws.promotions(state.pipeline).parent
    yield from ((folder, left) for folder, left in _in([promotions]) if left.path.name in files)


def _folders(state: WorkspaceState) -> Iterator[Location]:
    ws, mine = state.ws, state.pipeline
    roots = [
        ws.runs(mine),
        ws.dataset(mine, "x", "x").parent.parent,
        ws.model(mine, "x", "x").parent.parent,
        ws.table(mine, "x").parent,
        ws.report(mine, "x").parent,
        ws.forgotten(mine),
    ]
    if state.spec.publish is not None:
        name, warehouse = table_name(state.spec), ws.lake / "warehouse"
        roots += [warehouse / name, warehouse / f"{name}_current", warehouse / "headrace_publications" / name]
    if not is_at_work(ws, f"{mine}-search"):
        roots.append(ws.search(mine, "x", "x").parent.parent)
    for root in roots:
        yield from _below(root, 3)


def _below(folder: Location, depth: int) -> Iterator[Location]:
    yield folder
    for entry in folder.entries() if depth else ():
        if entry.is_dir():
            # What is below a log is Delta's own.
            yield from _below(entry, 0 if entry.name == "_delta_log" else depth - 1)
