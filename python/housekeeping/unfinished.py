"""Files and folders that were being written when their writer was killed: no reader sees them, and they take room."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.housekeeping.step import Step
from headrace.housekeeping.workspace_state import WorkspaceState, is_at_work
from headrace.storage import Location
from headrace.storage.objects.copies import abandoned, remove_abandoned


def unfinished_steps(state: WorkspaceState) -> Iterator[Step]:
    """Those in lake and store that nobody has written to for long, and this host's on their way to a store.

    Of the pipeline, whose lock whoever removes them holds; of its searches where none is at work.
    """
    before = state.before_ns(state.keep.unfinished_days)
    for folder in _folders(state):
        for left in folder.unfinished():
            if left.modified_ns < before:
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

    Of this host's on their way to a store those go that nobody has written to for a day: all pipelines have one folder
    for them, and no lock says who is at work there.
    """
    remove_abandoned()
    for folder in _folders(state):
        folder.discard_unfinished()


def _folders(state: WorkspaceState) -> Iterator[Location]:
    ws, mine = state.ws, state.pipeline
    roots = [
        ws.runs(mine),
        ws.dataset(mine, "x", "x").parent.parent,
        ws.model(mine, "x", "x").parent.parent,
        ws.table(mine, "x").parent,
        ws.report(mine, "x").parent,
    ]
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
