"""Folders and files of days: datasets, searches, logs, reports."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.housekeeping.step import Step, newest_write_ns, remove_all, size_of
from headrace.housekeeping.workspace_state import WorkspaceState, is_at_work
from headrace.storage import Location
from headrace.train.replay_days import replay_days


def dataset_steps(state: WorkspaceState) -> Iterator[Step]:
    """Datasets of old days, and those that no manifest names any more."""
    ws, first = state.ws, state.first_day(state.keep.datasets)
    # From which the next days' trainings draw.
    newest = state.newest_day
    replayed = set() if newest is None else {*replay_days(state.spec, newest)}
    first = min(first, *replayed) if replayed else first
    named = {o.name for _, m in state.manifests() if not m.removed for o in m.outputs if o.kind == "dataset"}
    base = ws.dataset(state.pipeline, "x", "x").parent.parent
    idle = state.before_ns(state.keep.unfinished_days)
    # On whose rows every later model is measured.
    measured_on = state.spec.retrain.forgetting_day if state.spec.retrain else None
    for day in base.entries():
        for folder in day.entries():
            if ws.name_of(folder) in named and day.name == measured_on:
                continue
            if day.name < first:
                yield removal(state, "dataset", day.name, folder, f"before {first}")
            elif ws.name_of(folder) not in named and newest_write_ns(folder) < idle:
                yield removal(state, "dataset", day.name, folder, "no manifest names it")
    yield from empty_folders(state, base)


def search_steps(state: WorkspaceState) -> Iterator[Step]:
    """Searches of old days, but while one is at work."""
    first = state.first_day(state.keep.searches)
    if is_at_work(state.ws, f"{state.pipeline}-search"):
        return
    base = state.ws.search(state.pipeline, "x", "x").parent.parent
    for day in base.entries():
        if day.name < first:
            yield removal(state, "search", day.name, day, f"before {first}")


def log_steps(state: WorkspaceState) -> Iterator[Step]:
    """Logs of old days."""
    first = state.first_day(state.keep.logs)
    for day in state.ws.log(state.pipeline, "x", "x").parent.parent.entries():
        if day.name < first:
            yield removal(state, "log", day.name, day, f"before {first}")


def report_steps(state: WorkspaceState) -> Iterator[Step]:
    """Reports of old days."""
    first = state.first_day(state.keep.reports)
    for page in state.ws.report(state.pipeline, "x").parent.entries():
        if page.stem < first:
            yield removal(state, "report", page.stem, page, f"before {first}")


def empty_folders(state: WorkspaceState, base: Location) -> Iterator[Step]:
    """Folders of days in which nothing is left."""
    for day in base.entries():
        if day.is_dir() and not any(True for _ in day.files()) and not day.unfinished():
            name = state.ws.name_of(day)
            yield Step("unfinished", name, "nothing is in it", act=day.remove)


def removal(state: WorkspaceState, kind: str, day: str, place: Location, reason: str, *named: str) -> Step:
    """The step that removes a place of a day; `named`: what manifests name of it, if not the place itself."""
    name = state.ws.name_of(place)

    def act() -> None:
        state.note_removed(day, set(named) or {name})
        remove_all([place], state.lock)

    return Step(kind, name, reason, size_of(place), act)
