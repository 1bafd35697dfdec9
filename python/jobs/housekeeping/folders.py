"""Folders and files that can be removed: datasets, models, searches, logs, reports, scratch and unfinished writes.

Models go with their versions in the registry, and with what a host has mapped of them. Unfinished writes are those
whose writer was killed: no reader sees them, and they take room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.housekeeping.workspace_state import (
    CleanupStep,
    WorkspaceState,
    is_at_work,
    manifests_of,
    newest_write_ns,
    others_at_work,
    remove_all,
    size_of,
)
from headrace.lake.scratch import EXCHANGING_STAGES, STAGE_FOLDERS
from headrace.models.predictor import maps_of, needed_models
from headrace.models.registry.promotion import IN_USE, age
from headrace.models.registry.versions import CHAMPION, Version, aliases, old_records, remove_records, versions
from headrace.publish.target import table_name
from headrace.storage import Location
from headrace.storage.host_scratch import OF_WORKSPACE
from headrace.storage.lease import HeldFolder
from headrace.storage.objects.copies import abandoned_uploads, remove_abandoned_uploads
from headrace.storage.store import Unfinished
from headrace.train.setup.earlier_days import replay_days

#: Suffixes of registered models' names, after the pipeline's name.
REGISTERED_SUFFIXES = ("", "-baseline", "-second_stage")
#: Files that a training writes beside its model, for its own use.
OF_TRAINING = ("checkpoints", "ranks-", "progress-", "metrics-", "trace.json", "launch", "rank-error.json")


def dataset_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield datasets of old days, and those that no manifest names any more."""
    ws, first = state.ws, state.first_day(state.keep.datasets)
    # The next days' trainings draw rows from these days.
    newest = state.newest_day
    replayed = set() if newest is None else {*replay_days(state.spec, newest)}
    first = min(first, *replayed) if replayed else first
    # Of any kind: stages of packages may write there, too.
    outputs = [(m.ds, o.name, ws.locate(o.name)) for _, m in state.manifests() if not m.removed for o in m.outputs]
    base = ws.dataset(state.pipeline, "x", "x").parent.parent
    idle = state.before_ns(state.keep.unfinished_days)
    # Every later model is measured on this day's rows.
    measured_on = state.spec.retrain.forgetting_day if state.spec.retrain else None
    for day in base.entries():
        for folder in day.entries():
            named = [name for ds, name, place in outputs if ds == day.name and place.is_below(folder)]
            if named and day.name == measured_on:
                continue
            if day.name < first:
                yield removal(state, "dataset", day.name, folder, f"before {first}", *named)
            elif not named and newest_write_ns(folder) < idle:
                yield removal(state, "dataset", day.name, folder, "no manifest names it")
    yield from empty_folders(state, base)


def search_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield searches of old days, but not while a search is at work."""
    first = state.first_day(state.keep.searches)
    if is_at_work(state.ws, f"{state.pipeline}-search"):
        return
    base = state.ws.search(state.pipeline, "x", "x").parent.parent
    for day in base.entries():
        if day.name < first:
            yield removal(state, "search", day.name, day, f"before {first}")


def log_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield logs of old days."""
    first = state.first_day(state.keep.logs)
    for day in state.ws.log(state.pipeline, "x", "x").parent.parent.entries():
        if day.name < first:
            yield removal(state, "log", day.name, day, f"before {first}")


def report_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield reports of old days."""
    first = state.first_day(state.keep.reports)
    for page in state.ws.report(state.pipeline, "x").parent.entries():
        if page.stem < first:
            yield removal(state, "report", page.stem, page, f"before {first}")


def empty_folders(state: WorkspaceState, base: Location) -> Iterator[CleanupStep]:
    """Yield folders of days that are empty."""
    for day in base.entries():
        if day.is_dir() and not any(True for _ in day.files()) and not day.unfinished():
            name = state.ws.name_of(day)
            yield CleanupStep("unfinished", name, "nothing is in it", act=day.remove)


def removal(state: WorkspaceState, kind: str, day: str, place: Location, reason: str, *named: str) -> CleanupStep:
    """Return the step that removes a place of a day; `named`: its outputs in manifests, if not the place itself."""
    name = state.ws.name_of(place)

    def act() -> None:
        state.note_removed(day, set(named) or {name})
        remove_all([place], state.lock)

    return CleanupStep(kind, name, reason, size_of(place), act)


def kept_models(state: WorkspaceState) -> dict[Location, str]:
    """Return the folders of saved models that stay, whatever their day, and why.

    Kept are versions with an alias and the last `before_champion` champions, which `headrace rollback` takes; versions
    that the spec names by number (`score.model`, an experiment's arm); models that manifests of kept days name; models
    that runs of other pipelines started from; and the bases of all of these.
    """
    ws = state.ws
    reasons: dict[Location, str] = {}
    named_versions = _named(state.spec)
    for suffix in REGISTERED_SUFFIXES:
        known = versions_with_aliases(ws, state.pipeline + suffix)
        for version, names in known:
            if version.version in named_versions:
                reason = f"version {version.version} is named by {named_versions[version.version]}"
                reasons |= dict.fromkeys(_places(ws, state.pipeline, version), reason)
            for alias in names:
                reasons |= dict.fromkeys(_places(ws, state.pipeline, version), f"version {version.version} is @{alias}")
            if CHAMPION in names:
                for previous in _previous_champions(state, known, version):
                    reason = f"version {previous.version} is before the champion"
                    reasons = dict.fromkeys(_places(ws, state.pipeline, previous), reason) | reasons
    first = state.first_day(state.keep.models)
    for _, manifest in state.manifests():
        for output in manifest.outputs if manifest.ds >= first and not manifest.removed else ():
            if output.kind == "model":
                reasons.setdefault(ws.locate(output.name), f"of {manifest.ds}")
    reasons |= _start_models_of_others(state, first)
    for model, reason in list(reasons.items()):
        # A model that cannot be opened is kept without its bases.
        with suppress(UserError):
            for folder in needed_models(model):
                reasons.setdefault(folder, f"{ws.name_of(model)} rests on it ({reason})")
    return reasons


def versions_with_aliases(ws: Workspace, name: str) -> list[tuple[Version, tuple[str, ...]]]:
    """Return all versions of a registered model with their aliases, oldest first."""
    named = aliases(ws, name)
    return [(v, tuple(sorted(a for a, number in named.items() if number == v.version))) for v in versions(ws, name)]


def model_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield models that are not kept, and files of finished trainings beside those that are."""
    ws, kept_folders = state.ws, kept_models(state)
    named: dict[str, dict[str, str]] = {}
    for _, manifest in state.manifests():
        # Of any kind: stages of packages may write there, too.
        for output in manifest.outputs if not manifest.removed else ():
            named.setdefault(manifest.ds, {})[output.name] = manifest.stage
    base = ws.model(state.pipeline, "x", "x").parent.parent
    first = state.first_day(state.keep.models)
    idle = state.before_ns(state.keep.unfinished_days)
    past = state.first_day(state.keep.checkpoints)
    for day in base.entries():
        day_outputs = named.get(day.name, {})
        for folder in day.entries():
            outputs = [name for name in day_outputs if ws.locate(name).is_below(folder)]
            if not any(model.is_below(folder) for model in kept_folders):
                if outputs and day.name < first:
                    yield removal(state, "model", day.name, folder, f"before {first}", *outputs)
                elif not outputs and newest_write_ns(folder) < idle:
                    yield removal(state, "unfinished", day.name, folder, "no manifest names it")
            elif outputs and day.name < past:
                yield from _left_by_training(state, folder, past)
    yield from empty_folders(state, base)


def mapped_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield this host's mapped files of removed models. Processes that have them open keep them."""
    ws, maps = state.ws, state.ws.mapped(state.pipeline)
    entries = [entry for entry in maps.entries() if not entry.name.startswith(OF_WORKSPACE)]
    if not entries:
        return
    models = (f.parent for f in ws.model(state.pipeline, "x", "x").parent.parent.files() if f.name == "model.json")
    wanted_maps = {maps_of(folder, maps) for folder in models}
    for entry in entries:
        if entry not in wanted_maps:
            yield CleanupStep("mapped", ws.name_of(entry), "its model is gone", size_of(entry), entry.remove)


def _named(spec: Spec) -> dict[str, str]:
    """Return the key of the spec that names a version, by its number."""
    keys = {} if spec.score is None else {str(spec.score.model): "score.model"}
    for name, experiment in (spec.experiments or {}).items():
        for arm, arm_spec in experiment.arms.items():
            keys.setdefault(str(arm_spec.model), f"experiments.{name}.arms.{arm}")
    return {number: key for number, key in keys.items() if number.isdecimal()}


def _previous_champions(
    state: WorkspaceState, known: Sequence[tuple[Version, tuple[str, ...]]], champion: Version
) -> list[Version]:
    """Return the newest versions before the champion that were champion of their day, and whose folder is there."""
    earlier = [v for v, _ in known if v.status in IN_USE and age(v) < age(champion)]
    existing = [v for v in earlier if any(p.is_dir() for p in _places(state.ws, state.pipeline, v))]
    return sorted(existing, key=age, reverse=True)[: state.keep.before_champion]


def _places(ws: Workspace, pipeline: str, version: Version) -> list[Location]:
    """Return where a version's model is: the registry has the whole path, and workspaces are moved."""
    moved = [ws.model(pipeline, version.ds, version.key) / "model"] if version.ds and version.key else []
    return [version.source, *moved]


def _left_by_training(state: WorkspaceState, folder: Location, past: str) -> Iterator[CleanupStep]:
    left = [e for e in folder.entries() if e.name.startswith(OF_TRAINING)]
    if left:
        size = sum(map(size_of, left))
        name = f"{state.ws.name_of(folder)} ({', '.join(sorted(e.name.rstrip('-') for e in left))})"
        act = partial(remove_all, left, state.lock)
        yield CleanupStep("checkpoints", name, f"its training has finished, before {past}", size, act)


def _start_models_of_others(state: WorkspaceState, first: str) -> Mapping[Location, str]:
    """Return the models of this pipeline that other pipelines' runs started from, since the first kept day.

    While another pipeline is at work, and has no manifest yet, all models that it ever started from stay.
    """
    ws = state.ws
    models: dict[Location, str] = {}
    model_folder = ws.model(state.pipeline, "x", "x").parent.parent
    for other_pipeline in ws.pipelines():
        if other_pipeline == state.pipeline:
            continue
        at_work = is_at_work(ws, other_pipeline)
        for _, manifest in manifests_of(ws, other_pipeline):
            for read in manifest.inputs if at_work or manifest.ds >= first else ():
                if read.kind in ("model", "pretrained") and ws.locate(read.name).is_below(model_folder):
                    models[ws.locate(read.name)] = f"{other_pipeline} began with it on {manifest.ds}"
    return models


def registry_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield MLflow's records of old days without manifests, of which nothing else remains."""
    first = state.first_day(state.keep.manifests)
    days = set(state.ws.days(state.pipeline))
    for suffix in REGISTERED_SUFFIXES if first else ():
        name = state.pipeline + suffix
        if records := old_records(state.ws, name, first, days):
            name_ = f"{len(records)} trainings of {name} up to {records[-1].ds}"
            reason = f"before {first}, and nothing else of their days is left"
            yield CleanupStep("registry", name_, reason, act=partial(remove_records, state.ws, name, records))


def scratch_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield temporary files of this pipeline's stages, on this host and in the lake, and of ended Spark processes."""
    ws, pipeline = state.ws, state.pipeline
    places = [ws.spark_local / kind / pipeline for kind in STAGE_FOLDERS]
    places += [ws.exchange_folder(pipeline, stage, local_scratch=True) for stage in EXCHANGING_STAGES]
    yield from _idle(state, "unfinished", places, "a run that has ended left it")
    yield from _idle(state, "unfinished", _without_process(ws, pipeline), "a process that has ended left it")


def _without_process(ws: Workspace, pipeline: str) -> Iterator[Location]:
    """Spark's temporary files that no live process of this host holds."""
    entries = (ws.spark_local / "local").entries()
    names = {entry.name for entry in entries}
    # The process of a folder without a lock is unknown: it may belong to any run in this home.
    is_quiet = not others_at_work(ws, pipeline)
    for entry in entries:
        path = entry.local_path()
        if HeldFolder.is_held(path):
            continue
        has_lock = f"{entry.name}.lock" in names or HeldFolder.is_lock(path)
        if has_lock or is_quiet:
            yield entry


def decoded_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield decoded files of the lake, where no features were computed for long."""
    yield from _idle(state, "decoded", [state.ws.encoded(state.pipeline)], "it is made again where it is missing")


def _idle(state: WorkspaceState, kind: str, places: Iterable[Location], cause: str) -> Iterator[CleanupStep]:
    limit_ns = state.before_ns(state.keep.unfinished_days)
    for place in places:
        if place.exists() and newest_write_ns(place) < limit_ns:
            reason = f"{cause}; not written for {state.keep.unfinished_days:g} days"
            yield CleanupStep(kind, state.ws.name_of(place), reason, size_of(place), place.remove)


def unfinished_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield steps for old unfinished files in lake and store, and for this host's abandoned uploads.

    They cover the pipeline, whose lock the caller holds to remove them, and its searches where none is running.
    """
    for folder, left in _old(state, chain(_unfinished_in(_folders(state)), _without_lock(state))):
        name = f"{state.ws.name_of(folder)}/{left.path.name}"
        reason = f"its writer was killed; not written for {state.keep.unfinished_days:g} days"
        yield CleanupStep("unfinished", name, reason, left.size, left.remove)
    if not state.ws.is_local and (uploads := abandoned_uploads()):
        reason = "their writers were killed; not written for a day"
        yield CleanupStep(
            "unfinished",
            f"{len(uploads)} uploads of this host",
            reason,
            sum(uploads.values()),
            remove_abandoned_uploads,
        )


def discard_unfinished(state: WorkspaceState) -> None:
    """Remove unfinished files in lake and store, of any age. Call it under the pipeline's lock.

    Of landing files, promotions and stopped arms only old ones are removed: their writers do not hold that lock. Of
    this host's uploads only those are removed that nobody has written to for a day: all pipelines share one folder for
    them, and no lock names their writers.
    """
    remove_abandoned_uploads()
    # Staged files belong to ended runs: `headrace gc` removes all of them.
    folders = chain(_folders(state), _below(state.ws.staging(state.pipeline), 3))
    for _, left in chain(_unfinished_in(folders), _old(state, _without_lock(state))):
        left.remove()


def _old(
    state: WorkspaceState, unfinished: Iterable[tuple[Location, Unfinished]]
) -> Iterator[tuple[Location, Unfinished]]:
    limit_ns = state.before_ns(state.keep.unfinished_days)
    return ((folder, left) for folder, left in unfinished if left.modified_ns < limit_ns)


def _unfinished_in(folders: Iterable[Location]) -> Iterator[tuple[Location, Unfinished]]:
    return ((folder, left) for folder in folders for left in folder.unfinished())


def _without_lock(state: WorkspaceState) -> Iterator[tuple[Location, Unfinished]]:
    """Yield those in folders that are written to by who does not hold the pipeline's lock."""
    ws = state.ws
    landing = ws.landing(state.pipeline)
    stopped = ws.stopped_arm(state.pipeline, "x", "x").parent.parent
    yield from _unfinished_in(chain(_below(landing, 1), _below(landing / "late", 1), _below(stopped, 1)))
    # Pipelines share this folder.
    files = {ws.promotions(state.pipeline + suffix).name for suffix in REGISTERED_SUFFIXES}
    promotions = ws.promotions(state.pipeline).parent
    yield from ((folder, left) for folder, left in _unfinished_in([promotions]) if left.path.name in files)


def _folders(state: WorkspaceState) -> Iterator[Location]:
    ws, pipeline = state.ws, state.pipeline
    roots = [
        ws.runs(pipeline),
        ws.dataset(pipeline, "x", "x").parent.parent,
        ws.model(pipeline, "x", "x").parent.parent,
        ws.table(pipeline, "x").parent,
        ws.report(pipeline, "x").parent,
        ws.forgotten(pipeline),
    ]
    if state.spec.publish is not None:
        name, warehouse = table_name(state.spec), ws.lake / "warehouse"
        roots += [warehouse / name, warehouse / f"{name}_current", warehouse / "headrace_publications" / name]
    if not is_at_work(ws, f"{pipeline}-search"):
        roots.append(ws.search(pipeline, "x", "x").parent.parent)
    for root in roots:
        yield from _below(root, 3)


def _below(folder: Location, depth: int) -> Iterator[Location]:
    yield folder
    for entry in folder.entries() if depth else ():
        if entry.is_dir():
            # Files below a log are Delta's own.
            yield from _below(entry, 0 if entry.name == "_delta_log" else depth - 1)
