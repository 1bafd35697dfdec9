"""Where a day's training starts from: the newest saved model of an earlier day that fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import Model, Spec
from headrace.config.effects import OF_CHECKPOINTS, keys_with
from headrace.errors import UserError
from headrace.manifest import Input, Manifest
from headrace.models.predictor import read_meta
from headrace.registry.promotion import OVERRIDDEN, ROLLED_BACK
from headrace.registry.versions import numbered
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.workspace import Workspace

log = logging.getLogger("headrace.train")


@dataclass(frozen=True)
class WarmStart:
    """A saved model of the same pipeline. `name` is its folder below the workspace's home, `version` its key."""

    ds: str
    name: str
    version: str

    @property
    def input(self) -> Input:
        """It, among the inputs of a run."""
        return Input(kind="model", name=self.name, version=self.version)


def find_warm_start(
    ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema, begun: Sequence[Input] = ()
) -> WarmStart | None:
    """The newest finished model of a day before `ds` that stands and whose shape fits.

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
        begun: what a finished run of the day, which still stands, has read: the model that it began with may have been
            removed, refused or rolled back since, and is its start all the same.
    """
    for day in sorted((d for d in ws.days(spec.pipeline) if d < ds), reverse=True):
        for manifest in _of_day(ws, spec, day):
            output = manifest.output("model")
            found = WarmStart(day, output.name, output.version)
            reason = _why_not(ws, spec, schema, manifest, found.input in begun)
            if reason is None:
                return found
            log.info("not starting from the model of stage %s of %s: %s", manifest.stage, day, reason)
    return None


def _why_not(ws: Workspace, spec: Spec, schema: DatasetSchema, manifest: Manifest, begun: bool) -> str | None:
    """Why a day's model is no start; None where it is one. `begun`: a finished run has begun with it."""
    if manifest.removed:
        return None if begun else str(manifest.why_removed)
    if not begun and (reason := _taken_back(ws, spec, manifest)):
        return reason
    try:
        return misfit(read_meta(ws.locate(manifest.output("model").name)), spec, schema)
    except UserError as e:
        return str(e)


def _taken_back(ws: Workspace, spec: Spec, manifest: Manifest) -> str:
    """Whether a model was refused and nobody has overruled it, or was rolled back; empty where neither is."""
    registered = manifest.facts.get("registered")
    verdict = _verdict_on(_gate(ws, spec, manifest.ds), manifest.output("model").version)
    refused = verdict.get("verdict") == "refused"
    log_of_moves = ws.promotions(spec.pipeline)
    rolled_back = log_of_moves.is_file() and b'"rollback"' in log_of_moves.read_bytes()
    if not refused and not (rolled_back and registered):
        return ""
    found = numbered(ws, registered["name"], str(registered["version"])) if registered else None
    status = None if found is None else found.status
    if status == ROLLED_BACK:
        return "it was rolled back"
    return "the gate has refused it" if refused and status != OVERRIDDEN else ""


def _gate(ws: Workspace, spec: Spec, day: str) -> Manifest | None:
    return None if spec.gate is None else Manifest.load(ws.manifest(spec.pipeline, day, "gate"))


def _verdict_on(gate: Manifest | None, key: str) -> Mapping[str, Any]:
    """What a day's gate has said of the model of a key, the day's own or its challenger; empty: nothing."""
    if gate is None:
        return {}
    if gate.facts["model"]["key"] == key:
        return gate.facts
    challenger: Mapping[str, Any] = gate.facts.get("challenger") or {}
    return challenger if challenger.get("key") == key else {}


def _of_day(ws: Workspace, spec: Spec, day: str) -> list[Manifest]:
    """What trained a day's models, the better first: the challenger where the day's model had fallen behind it, and
    where it became champion.
    """
    found = [Manifest.load(ws.manifest(spec.pipeline, day, "train"))]
    challenger = None if spec.challenger is None else Manifest.load(ws.manifest(spec.pipeline, day, "challenger"))
    if spec.challenger is not None and challenger is not None and challenger.outputs:
        behind = challenger.facts.get("behind")
        verdict = _verdict_on(_gate(ws, spec, day), challenger.output("model").version)
        if verdict.get("becomes_champion") or (behind is not None and behind > spec.challenger.behind):
            found.insert(0, challenger)
    return [manifest for manifest in found if manifest is not None]


def misfit(meta: dict[str, Any], spec: Spec, schema: DatasetSchema) -> str | None:
    """Why a saved model (its model.json) cannot be a start for this spec and dataset; None where it can."""
    now = keys_with(spec.model, OF_CHECKPOINTS)
    saved = keys_with(Model.model_validate(meta.get("model", {})), OF_CHECKPOINTS)
    for key in now | saved:
        if now.get(key) != saved.get(key):
            return f"its model.{key} is {saved.get(key)}, now {now.get(key)}"
    tasks = [list(given) for given in (meta.get("tasks", {}), spec.train.tasks)]
    if tasks[0] != tasks[1]:
        return f"its tasks are {tasks[0]}, now {tasks[1]}"
    old = DatasetSchema.model_validate(meta["schema"])
    if [f.name for f in old.of(Kind.CONTINUOUS)] != [f.name for f in schema.of(Kind.CONTINUOUS)]:
        return "its continuous features are others"
    before = {f.name: f for f in old.of(Kind.CATEGORICAL)}
    categorical = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    if list(before) != list(categorical):
        return "its categorical features are others"
    for name, f in categorical.items():
        if _form(before[name]) != _form(f):
            return f"its feature '{name}' has another form"
        if (before[name].cardinality or 0) > (f.cardinality or 0):
            return f"its vocabulary of '{name}' has {before[name].cardinality} codes, the dataset's {f.cardinality}"
    return None


def _form(f: Feature) -> tuple[str | None, int, bool, bool]:
    return f.vocabulary, f.length, f.is_list, f.dynamic
