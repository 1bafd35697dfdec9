"""What is made again where it is missing, and texts: datasets, searches, caches, checkpoints, logs, reports."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.models import OF_TRAINING, REGISTERED_SUFFIXES
from headrace.housekeeping.step import remove_all, size_of
from headrace.housekeeping.workspace_state import WorkspaceState, is_at_work
from headrace.lake.handed_on import STAGE_FOLDERS
from headrace.manifest import Manifest
from headrace.registry.artifact import staging
from headrace.storage import Location

_FORGET = "forget"


def dataset_places(state: WorkspaceState) -> Iterator[Place]:
    """All datasets: their rows have codes, which are persons' still. Manifests say what was removed."""
    for day in state.ws.dataset(state.pipeline, "x", "x").parent.parent.entries():
        for folder in day.entries():
            note = f"made again by: headrace run {state.spec.argument} --ds {day.name} --to features"
            yield _removal(state, "dataset", day.name, folder, note)


def search_places(state: WorkspaceState) -> Iterator[Place]:
    """Samples of datasets for searches of hyper-parameters."""
    at_work = is_at_work(state.ws, f"{state.pipeline}-search")
    for day in state.ws.search(state.pipeline, "x", "x").parent.parent.entries():
        left = "a search is at work: run the command again when it has ended" if at_work else ""
        act = None if at_work else partial(remove_all, [day], state.lock)
        name, files = state.ws.name_of(day), _files(day)
        yield Place("search", name, removed=files, size=size_of(day), left=left, later=at_work, act=act)


def cache_places(state: WorkspaceState) -> Iterator[Place]:
    """Files of this host that are made again, and what stages that were killed have left."""
    ws, mine = state.ws, state.pipeline
    temporary = ws.spark_local
    places = [
        ws.encoded(mine),
        ws.mapped(mine),
        *(staging(ws, mine + suffix) for suffix in REGISTERED_SUFFIXES),
        *(temporary / kind / mine for kind in STAGE_FOLDERS),
    ]
    places += [ws.staging(mine)]
    places += [e for e in (temporary / "prepared").entries() if e.name.startswith(f"{mine}-")]
    for place in places:
        if place.exists():
            act = partial(remove_all, [place], state.lock)
            yield Place("cache", ws.name_of(place), removed=_files(place), size=size_of(place), act=act)


def training_places(state: WorkspaceState) -> Iterator[Place]:
    """What trainings left beside their models; one that has not finished begins anew."""
    for day in state.ws.model(state.pipeline, "x", "x").parent.parent.entries():
        for folder in day.entries():
            left = [e for e in folder.entries() if e.name.startswith(OF_TRAINING)]
            if left:
                size, files = sum(map(size_of, left)), sum(map(_files, left))
                name = state.ws.name_of(folder)
                yield Place("training", name, removed=files, size=size, act=partial(remove_all, left, state.lock))


def text_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Logs and reports that have a value go, manifests lose it.

    Samples of scores in manifests name their column; elsewhere short values cannot be told from other numbers.
    """
    ws = state.ws
    found = [(f, m) for f, m in state.manifests() if m.facts != _without(m.facts, persons)]
    sampled = {manifest.ds for _, manifest in found}
    for page in ws.report(state.pipeline, "x").parent.entries():
        if page.stem in sampled or _has(page, persons):
            yield _removal(state, "report", page.stem, page, f"made again by: headrace run {state.spec.argument}")
    for file in ws.log(state.pipeline, "x", "x").parent.parent.files() if persons.searchable else ():
        if _has(file, persons):
            yield Place(
                "log", ws.name_of(file), removed=1, size=file.size(), act=partial(remove_all, [file], state.lock)
            )
    # After the reports, which are found by them.
    for file, _ in found:
        yield Place("manifest", ws.name_of(file), rewritten=1, act=partial(_redact, state, file, persons))


def _redact(state: WorkspaceState, file: Location, persons: Persons) -> None:
    manifest = Manifest.load(file)
    assert manifest is not None, "under the pipeline's lock"
    state.save(manifest.model_copy(update={"facts": _without(manifest.facts, persons)}), file)


def _without(value: Any, persons: Persons) -> Any:
    """JSON without values: of lists of records those that name one in the column go."""
    if isinstance(value, str):
        return persons.without(value)
    if isinstance(value, dict):
        return {persons.without(k): _without(v, persons) for k, v in value.items()}
    if isinstance(value, list):
        kept = (v for v in value if not (isinstance(v, dict) and str(v.get(persons.column)) in persons.texts))
        return [_without(v, persons) for v in kept]
    return value


def _has(file: Location, persons: Persons) -> bool:
    return persons.in_bytes(file.read_bytes())


def _removal(state: WorkspaceState, kind: str, day: str, place: Location, note: str) -> Place:
    name = state.ws.name_of(place)

    def act() -> None:
        state.note_removed(day, {name}, _FORGET)
        remove_all([place], state.lock)

    return Place(kind, name, removed=_files(place), size=size_of(place), note=note, act=act)


def _files(place: Location) -> int:
    return 1 if place.is_file() else sum(1 for _ in place.files())
