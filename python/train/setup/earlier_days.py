"""Inputs of a training from earlier days: the starting model, replayed rows, and the day to measure forgetting on."""

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
    """A saved model of the same pipeline: `name` is its folder in the workspace, `version` its key."""

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
    """Find the newest finished model of a day before `ds` that is accepted and whose shape fits.

    A model is accepted if it was not rolled back, and if the gate has not refused it or a user has overruled that. The
    search reads manifests and model.json, and the registry only if a model was refused or rolled back.

    A model fits if its settings and features are the same, and vocabularies have only grown. Codes never change, so old
    rows keep their meaning. The log names a model that does not fit, with the reason.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day.
        schema: schema of the day's dataset.
        earlier_inputs: inputs of a finished run of the day that is still valid. It keeps its starting model, even if
            that was removed, refused or rolled back since.
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
    """Return why training cannot start from a day's model, or None; `is_resumed`: a finished run has done so."""
    if manifest.removed:
        return None if is_resumed else str(manifest.why_removed)
    if not is_resumed and (reason := _taken_back(ws, spec, manifest)):
        return reason
    try:
        return model_misfit(read_meta(ws.locate(manifest.output("model").name)), spec, schema)
    except UserError as e:
        return str(e)


def _taken_back(ws: Workspace, spec: Spec, manifest: Manifest) -> str:
    """Return the reason if a model was rolled back, or refused without being overruled; else an empty text."""
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
    """Return the verdict of a day's gate on the model with this key, the day's or its challenger; empty without one."""
    if gate is None:
        return {}
    if gate.facts["model"]["key"] == key:
        return gate.facts
    challenger: Mapping[str, Any] = gate.facts.get("challenger") or {}
    return challenger if challenger.get("key") == key else {}


def _of_day(ws: Workspace, spec: Spec, day: str) -> list[Manifest]:
    """Return the manifests of a day's models, the better one first.

    That is the challenger if the day's model had fallen behind it and the challenger became champion.
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
    """Return why training cannot start from a saved model (its model.json) with this spec and dataset, or None."""
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


#: Kind of the input of a run that is a pretrained model.
PRETRAINED = "pretrained"


def find_pretrained(ws: Workspace, spec: Spec, ds: str) -> tuple[Input, ...]:
    """Find the newest finished models up to `ds` of the pipelines that the spec names, in order of their parts' names.

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
    """Return why a model cannot read the split `valid` of an older dataset, or None.

    Args:
        ws: the workspace.
        manifest: manifest of the older day's stage `features`; None: there is none.
        schema: schema of the model's own dataset.
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
    """Return the days whose datasets a training of `ds` draws rows from, if they exist, oldest first.

    Rows are drawn from the split `valid` of each, whose days are before the window of `ds` and in no other split of the
    list. A dataset with a day of the rows of `forgetting_day` is left out, since forgetting is measured on them. Empty:
    nothing is replayed.
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


#: Kind of the input of a run that is a replayed dataset.
REPLAY = "replay"


def find_replay(
    ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema, earlier_inputs: Sequence[Input] = ()
) -> tuple[Input, ...]:
    """Find the older datasets that a training of `ds` draws rows from, oldest first.

    A day without a dataset, or whose rows have another meaning, is left out.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day.
        schema: schema of the day's dataset.
        earlier_inputs: inputs of a finished run of the day that is still valid; it keeps datasets that were removed
            since.
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
    """Return the earlier day on whose rows the model of `ds` is measured too, or None."""
    day = None if spec.retrain is None else spec.retrain.forgetting_day
    return None if day is None or day >= ds else day


def find_forgetting_dataset(ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema | None) -> str | None:
    """Return the name in the workspace of the dataset of `forgetting_day`, if it exists and its codes mean the same.

    The log names a requested dataset that cannot be used, with the reason.
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
