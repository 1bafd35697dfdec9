"""Saved models: which are kept, and what of the others' folders goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from headrace.config import Spec
from headrace.errors import UserError
from headrace.housekeeping.folders import empty_folders, removal
from headrace.housekeeping.step import Step, newest_write_ns, remove_all, size_of
from headrace.housekeeping.workspace_state import WorkspaceState, is_at_work, manifests_of
from headrace.models.predictor import maps_of, needed_models
from headrace.registry.promotion import IN_USE, age
from headrace.registry.versions import CHAMPION, Version, aliases, versions
from headrace.storage import Location
from headrace.storage.host_scratch import OF_WORKSPACE
from headrace.workspace import Workspace

#: After the pipeline's name, of registered models.
REGISTERED_SUFFIXES = ("", "-baseline", "-second_stage")
#: What a training leaves beside its model, for itself alone.
OF_TRAINING = ("checkpoints", "ranks-", "progress-", "metrics-", "trace.json", "launch", "rank-error.json")


def kept_models(state: WorkspaceState) -> dict[Location, str]:
    """The folders of saved models that stay, whatever their day, and why.

    Those of versions with an alias and of `before_champion` that were champion before, which `headrace rollback` takes,
    those that the spec names by number (`score.model`, an experiment's arm), those that manifests of kept days name,
    those that runs of other pipelines began with, and what any of these rests on.
    """
    ws = state.ws
    found: dict[Location, str] = {}
    asked = _named(state.spec)
    for suffix in REGISTERED_SUFFIXES:
        known = listed(ws, state.pipeline + suffix)
        for version, names in known:
            if version.version in asked:
                why = f"version {version.version} is named by {asked[version.version]}"
                found |= dict.fromkeys(_places(ws, state.pipeline, version), why)
            for alias in names:
                found |= dict.fromkeys(_places(ws, state.pipeline, version), f"version {version.version} is @{alias}")
            if CHAMPION in names:
                for before in _before(state, known, version):
                    why = f"version {before.version} is before the champion"
                    found = dict.fromkeys(_places(ws, state.pipeline, before), why) | found
    first = state.first_day(state.keep.models)
    for _, manifest in state.manifests():
        for output in manifest.outputs if manifest.ds >= first and not manifest.removed else ():
            if output.kind == "model":
                found.setdefault(ws.locate(output.name), f"of {manifest.ds}")
    found |= _of_others(state, first)
    for model, why in list(found.items()):
        # One that cannot be opened is kept for itself.
        with suppress(UserError):
            for folder in needed_models(model):
                found.setdefault(folder, f"{ws.name_of(model)} rests on it ({why})")
    return found


def listed(ws: Workspace, name: str) -> list[tuple[Version, tuple[str, ...]]]:
    """All versions of a registered model with their aliases, oldest first."""
    named = aliases(ws, name)
    return [(v, tuple(sorted(a for a, number in named.items() if number == v.version))) for v in versions(ws, name)]


def model_steps(state: WorkspaceState) -> Iterator[Step]:
    """Models that are not kept, and what finished trainings have left beside those that are."""
    ws, kept = state.ws, kept_models(state)
    named: dict[str, dict[str, str]] = {}
    for _, manifest in state.manifests():
        for output in manifest.outputs:
            if output.kind == "model" and not manifest.removed:
                named.setdefault(manifest.ds, {})[output.name] = manifest.stage
    base = ws.model(state.pipeline, "x", "x").parent.parent
    first = state.first_day(state.keep.models)
    idle = state.before_ns(state.keep.unfinished_days)
    past = state.first_day(state.keep.checkpoints)
    for day in base.entries():
        mine = named.get(day.name, {})
        for folder in day.entries():
            outputs = [name for name in mine if ws.locate(name).is_below(folder)]
            if not any(model.is_below(folder) for model in kept):
                if outputs and day.name < first:
                    yield removal(state, "model", day.name, folder, f"before {first}", *outputs)
                elif not outputs and newest_write_ns(folder) < idle:
                    yield removal(state, "unfinished", day.name, folder, "no manifest names it")
            elif outputs and day.name < past:
                yield from _left_by_training(state, folder, past)
    yield from empty_folders(state, base)


def mapped_steps(state: WorkspaceState) -> Iterator[Step]:
    """What this host has mapped of models that are gone. Who maps them now keeps what is open."""
    ws, maps = state.ws, state.ws.mapped(state.pipeline)
    there = [entry for entry in maps.entries() if not entry.name.startswith(OF_WORKSPACE)]
    if not there:
        return
    models = (f.parent for f in ws.model(state.pipeline, "x", "x").parent.parent.files() if f.name == "model.json")
    wanted = {maps_of(folder, maps) for folder in models}
    for entry in there:
        if entry not in wanted:
            yield Step("mapped", ws.name_of(entry), "its model is gone", size_of(entry), entry.remove)


def _named(spec: Spec) -> dict[str, str]:
    """By number of a version, the key of the spec that names it."""
    found = {} if spec.score is None else {str(spec.score.model): "score.model"}
    for name, experiment in (spec.experiments or {}).items():
        for arm, of in experiment.arms.items():
            found.setdefault(str(of.model), f"experiments.{name}.arms.{arm}")
    return {number: key for number, key in found.items() if number.isdecimal()}


def _before(
    state: WorkspaceState, known: Sequence[tuple[Version, tuple[str, ...]]], champion: Version
) -> list[Version]:
    """The newest versions before the champion that were champion of their day, and whose folder is there."""
    earlier = [v for v, _ in known if v.status in IN_USE and age(v) < age(champion)]
    there = [v for v in earlier if any(p.is_dir() for p in _places(state.ws, state.pipeline, v))]
    return sorted(there, key=age, reverse=True)[: state.keep.before_champion]


def _places(ws: Workspace, pipeline: str, version: Version) -> list[Location]:
    """Where a version's model is: the registry has the whole path, and workspaces are moved."""
    moved = [ws.model(pipeline, version.ds, version.key) / "model"] if version.ds and version.key else []
    return [version.source, *moved]


def _left_by_training(state: WorkspaceState, folder: Location, past: str) -> Iterator[Step]:
    left = [e for e in folder.entries() if e.name.startswith(OF_TRAINING)]
    if left:
        size = sum(map(size_of, left))
        name = f"{state.ws.name_of(folder)} ({', '.join(sorted(e.name.rstrip('-') for e in left))})"
        act = partial(remove_all, left, state.lock)
        yield Step("checkpoints", name, f"its training has finished, before {past}", size, act)


def _of_others(state: WorkspaceState, first: str) -> Mapping[Location, str]:
    """Models of this pipeline that other pipelines' runs have begun with, since the first day that is kept here.

    While another pipeline is at work, and has no manifest yet, all that it has ever begun with stay.
    """
    ws = state.ws
    found: dict[Location, str] = {}
    mine = ws.model(state.pipeline, "x", "x").parent.parent
    for other in ws.pipelines():
        if other == state.pipeline:
            continue
        at_work = is_at_work(ws, other)
        for _, manifest in manifests_of(ws, other):
            for read in manifest.inputs if at_work or manifest.ds >= first else ():
                if read.kind in ("model", "pretrained") and ws.locate(read.name).is_below(mine):
                    found[ws.locate(read.name)] = f"{other} began with it on {manifest.ds}"
    return found
