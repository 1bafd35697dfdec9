"""Starting model, replayed rows and the day to measure on: the part of a training that earlier days have left."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from headrace.config import Model, Spec
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.section import OF_CHECKPOINTS, keys_with
from headrace.config.workspace import Workspace
from headrace.dataset.layout import open_split
from headrace.errors import UserError
from headrace.features.layout.files import split_ranges
from headrace.models.predictor import read_meta
from headrace.models.registry.promotion import OVERRIDDEN, ROLLED_BACK
from headrace.models.registry.versions import numbered
from headrace.stage.manifest import Input, Manifest

log = logging.getLogger("headrace.train")


@dataclass(frozen=True)
class WarmStart:
    """A saved model of the same pipeline. `name` is its folder below the workspace's home, `version` its key."""

    ds: str
    name: str
    version: str

    @property
    def input(self) -> Input:
        """The model as an input of a run."""
        return Input(kind="model", name=self.name, version=self.version)


def find_warm_start(
    ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema, earlier_inputs: Sequence[Input] = ()
) -> WarmStart | None:
    """Find the newest finished model of a day before `ds` that stands and whose shape fits.

    One stands that the gate has not refused (or somebody has overruled that) and that nobody has rolled back. Manifests
    and model.json are read; the registry only where a model was refused or rolled back.

    It fits where the model's settings are the same and the features are the same, with vocabularies that have only
    grown: codes are given once and never change, so old rows keep their meaning. A model that does not fit is named
    in the log with the reason.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day.
        schema: of its dataset.
        earlier_inputs: the inputs of a finished run of the day which still stands: the model that it began with may
            have been removed, refused or rolled back since, and is its start all the same.
    """
    for day in sorted((d for d in ws.days(spec.pipeline) if d < ds), reverse=True):
        for manifest in _of_day(ws, spec, day):
            output = manifest.output("model")
            start = WarmStart(day, output.name, output.version)
            reason = _why_not(ws, spec, schema, manifest, start.input in earlier_inputs)
            if reason is None:
                return start
            log.info("not starting from the model of stage %s of %s: %s", manifest.stage, day, reason)
    return None


def _why_not(ws: Workspace, spec: Spec, schema: DatasetSchema, manifest: Manifest, is_resumed: bool) -> str | None:
    """Return the reason why a day's model is no start, or None. `is_resumed`: a finished run has begun with it."""
    if manifest.removed:
        return None if is_resumed else str(manifest.why_removed)
    if not is_resumed and (reason := _taken_back(ws, spec, manifest)):
        return reason
    try:
        return model_misfit(read_meta(ws.locate(manifest.output("model").name)), spec, schema)
    except UserError as e:
        return str(e)


def _taken_back(ws: Workspace, spec: Spec, manifest: Manifest) -> str:
    """Return the reason if a model was refused and nobody has overruled it, or was rolled back; else an empty text."""
    registered = manifest.facts.get("registered")
    verdict = _verdict_on(_gate(ws, spec, manifest.ds), manifest.output("model").version)
    refused = verdict.get("verdict") == "refused"
    log_of_moves = ws.promotions(spec.pipeline)
    rolled_back = log_of_moves.is_file() and b'"rollback"' in log_of_moves.read_bytes()
    if not refused and not (rolled_back and registered):
        return ""
    version = numbered(ws, registered["name"], str(registered["version"])) if registered else None
    status = None if version is None else version.status
    if status == ROLLED_BACK:
        return "it was rolled back"
    return "the gate has refused it" if refused and status != OVERRIDDEN else ""


def _gate(ws: Workspace, spec: Spec, day: str) -> Manifest | None:
    return None if spec.gate is None else Manifest.load(ws.manifest(spec.pipeline, day, "gate"))


def _verdict_on(gate: Manifest | None, key: str) -> Mapping[str, Any]:
    """Return the verdict of a day's gate on the model of a key, the day's own or its challenger; empty: none."""
    if gate is None:
        return {}
    if gate.facts["model"]["key"] == key:
        return gate.facts
    challenger: Mapping[str, Any] = gate.facts.get("challenger") or {}
    return challenger if challenger.get("key") == key else {}


def _of_day(ws: Workspace, spec: Spec, day: str) -> list[Manifest]:
    """Return the manifests of a day's models, the better first: the challenger if the day's model had fallen behind it,
    and if it became champion.
    """
    manifests = [Manifest.load(ws.manifest(spec.pipeline, day, "train"))]
    challenger = None if spec.challenger is None else Manifest.load(ws.manifest(spec.pipeline, day, "challenger"))
    if spec.challenger is not None and challenger is not None and challenger.outputs:
        deficit = challenger.facts.get("behind")
        verdict = _verdict_on(_gate(ws, spec, day), challenger.output("model").version)
        if verdict.get("becomes_champion") or (deficit is not None and deficit > spec.challenger.behind):
            manifests.insert(0, challenger)
    return [manifest for manifest in manifests if manifest is not None]


def model_misfit(meta: dict[str, Any], spec: Spec, schema: DatasetSchema) -> str | None:
    """Return the reason why a saved model (its model.json) cannot be a start for this spec and dataset, or None."""
    now = keys_with(spec.model, OF_CHECKPOINTS)
    saved = keys_with(Model.model_validate(meta.get("model", {})), OF_CHECKPOINTS)
    for key in now | saved:
        if now.get(key) != saved.get(key):
            return f"its model.{key} is {saved.get(key)}, now {now.get(key)}"
    tasks = [list(names) for names in (meta.get("tasks", {}), spec.train.tasks)]
    if tasks[0] != tasks[1]:
        return f"its tasks are {tasks[0]}, now {tasks[1]}"
    old = DatasetSchema.model_validate(meta["schema"])
    if [f.name for f in old.of(Kind.CONTINUOUS)] != [f.name for f in schema.of(Kind.CONTINUOUS)]:
        return "its continuous features are others"
    old_features = {f.name: f for f in old.of(Kind.CATEGORICAL)}
    categorical = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    if list(old_features) != list(categorical):
        return "its categorical features are others"
    for name, f in categorical.items():
        if _categorical_form(old_features[name]) != _categorical_form(f):
            return f"its feature '{name}' has another form"
        if (old_features[name].cardinality or 0) > (f.cardinality or 0):
            return (
                f"its vocabulary of '{name}' has {old_features[name].cardinality} codes, the dataset's {f.cardinality}"
            )
    return None


def _categorical_form(f: Feature) -> tuple[str | None, int, bool, bool]:
    return f.vocabulary, f.length, f.is_list, f.dynamic


#: The kind of a manifest's input.
PRETRAINED = "pretrained"


def find_pretrained(ws: Workspace, spec: Spec, ds: str) -> tuple[Input, ...]:
    """Find the newest finished models up to `ds` of the pipelines that the spec names, in the order of parts' names.

    Raises:
        UserError: a pipeline has none.
    """
    inputs = []
    for part, pipeline in sorted(spec.train.pretrained.items()):
        days = sorted((d for d in ws.days(pipeline) if d <= ds), reverse=True)
        manifests = (Manifest.load(ws.manifest(pipeline, day, "train")) for day in days)
        manifest = next((m for m in manifests if m is not None), None)
        if manifest is None:
            raise UserError(
                f"train.pretrained.{part}: pipeline '{pipeline}' has no trained model up to {ds}; train it first: "
                f"headrace run PIPELINE --set pipeline={pipeline} --to train"
            )
        output = manifest.output("model")
        inputs.append(Input(kind=PRETRAINED, name=output.name, version=output.version))
    return tuple(inputs)


def dataset_misfit(
    ws: Workspace, manifest: Manifest | None, schema: DatasetSchema, carried: Sequence[str] = ()
) -> str | None:
    """Return the reason why the split `valid` of an older dataset cannot be shown to a model, or None.

    Args:
        ws: the workspace.
        manifest: of the older day's stage `features`; None: there is none.
        schema: of the model's own dataset.
        carried: names of carried columns that are read besides the features.
    """
    if manifest is None:
        return "there is no dataset of that day"
    if manifest.removed:
        return manifest.why_removed
    older = manifest.dataset_schema
    if older is None or [_feature_form(f) for f in _features(older)] != [_feature_form(f) for f in _features(schema)]:
        return "its dataset has other features"
    for old, new in zip(_features(older), _features(schema), strict=True):
        if (old.cardinality or 0) > (new.cardinality or 0):
            return f"its vocabulary of '{old.name}' has {old.cardinality} codes, the model's {new.cardinality}"
    carried_names = {f.name for f in older.of(Kind.CARRIED)}
    for name in carried:
        if name not in carried_names:
            return f"it carries no column '{name}'"
    try:
        rows = open_split(ws.locate(manifest.output("dataset").name), "valid", schema).rows
    except UserError as e:
        return str(e)
    return None if rows else "its split valid has no rows"


def _features(schema: DatasetSchema) -> list[Feature]:
    return [f for f in schema.features if f.kind is not Kind.CARRIED]


def _feature_form(f: Feature) -> tuple[object, ...]:
    return f.name, f.kind, f.length, f.is_list, f.vocabulary, f.dynamic


def replay_days(spec: Spec, ds: str) -> list[str]:
    """Return the days from whose datasets a training of `ds` draws, if they exist, the oldest first.

    Of each it is the split `valid`, whose days lie before the window of `ds` and in no other dataset's of the list;
    A dataset that has a day of the rows of `forgetting_day` is not drawn from, since what is forgotten is measured on
    them. Empty: nothing is replayed.
    """
    replay = None if spec.retrain is None else spec.retrain.replay
    if spec.retrain is None or replay is None:
        return []
    first = split_ranges(spec, ds)[0][0]
    day = date.fromisoformat(ds)
    while split_ranges(spec, day.isoformat())[1][1] >= first:
        day -= timedelta(days=1)
    each = spec.features.split.valid_days
    days = [(day - timedelta(days=back)).isoformat() for back in range(0, replay.days, each)]
    measured_on = spec.retrain.forgetting_day
    if measured_on is None:
        return sorted(days)
    begin, end = split_ranges(spec, measured_on)[1]
    ranges = {d: split_ranges(spec, d)[1] for d in days}
    return sorted(d for d, (from_, to) in ranges.items() if to < begin or end < from_)


#: The kind of these datasets among the inputs of a run.
REPLAY = "replay"


def find_replay(
    ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema, earlier_inputs: Sequence[Input] = ()
) -> tuple[Input, ...]:
    """Find the older datasets that a training of `ds` draws from, the oldest first.

    A day without one, or whose rows mean something else, is left out.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day.
        schema: of its dataset.
        earlier_inputs: the inputs of a finished run of the day which still stands: a dataset that was removed since
            is among its inputs all the same.
    """
    inputs, carried = [], [f.name for f in schema.of(Kind.CARRIED)]
    for day in replay_days(spec, ds):
        manifest = Manifest.load(ws.manifest(spec.pipeline, day, "features"))
        if manifest is None:
            continue
        output = manifest.output("dataset")
        read = Input(kind=REPLAY, name=output.name, version=output.version)
        reason = None if read in earlier_inputs else dataset_misfit(ws, manifest, schema, carried)
        if reason is None:
            inputs.append(read)
        else:
            log.info("no rows of %s are replayed: %s", day, reason)
    return tuple(inputs)


def forgetting_day(spec: Spec, ds: str) -> str | None:
    """Return the day on whose rows the model of `ds` is to be measured, too, or None."""
    day = None if spec.retrain is None else spec.retrain.forgetting_day
    return None if day is None or day >= ds else day


def find_forgetting_dataset(ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema | None) -> str | None:
    """Return the name in the workspace of the dataset of that day, if it exists and its codes mean the same.

    A dataset that is asked for and cannot be measured on is named in the log with the reason.
    """
    day = forgetting_day(spec, ds)
    if day is None or schema is None:
        return None
    try:
        manifest = Manifest.load(ws.manifest(spec.pipeline, day, "features"))
        reason = dataset_misfit(ws, manifest, schema)
    except UserError as e:
        manifest, reason = None, str(e)
    if reason is not None or manifest is None:
        log.warning("not measured on the rows of %s: %s", day, reason)
        return None
    return manifest.output("dataset").name
