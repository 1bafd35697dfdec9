"""Where a day's training starts from: the newest saved model of an earlier day that fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import Model, Spec
from headrace.errors import UserError
from headrace.manifest import Input, Manifest
from headrace.models.predictor import read_meta
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.workspace import Workspace

log = logging.getLogger("headrace.train")


@dataclass(frozen=True)
class WarmStart:
    """A saved model of the same pipeline. `name` is its folder below the workspace's home, `version` its key."""

    ds: str
    name: str
    version: str


def find_warm_start(
    ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema, begun: Sequence[Input] = ()
) -> WarmStart | None:
    """The newest finished model of a day before `ds` whose shape fits; reads manifests and model.json only.

    It fits where the model's settings are the same and the features are the same, with vocabularies that have only
    grown: codes are given once and never change, so old rows keep their meaning. A model that does not fit is named
    in the log with the reason.

    Args:
        ws: the workspace.
        spec: the pipeline.
        ds: the day.
        schema: of its dataset.
        begun: what a finished run of the day, which still stands, has read: the model that it began with may have been
            removed since, and is its start all the same.
    """
    for day in sorted((d for d in ws.days(spec.pipeline) if d < ds), reverse=True):
        manifest = _better_of(ws, spec, day)
        if manifest is None:
            continue
        output = manifest.output("model")
        if manifest.removed:
            if Input(kind="model", name=output.name, version=output.version) in begun:
                return WarmStart(day, output.name, output.version)
            log.info("not starting from the model of %s: %s", day, manifest.why_removed)
            continue
        try:
            meta = read_meta(ws.locate(output.name))
            reason = misfit(meta, spec, schema)
        except UserError as e:
            reason = str(e)
        if reason is None:
            return WarmStart(day, output.name, output.version)
        log.info("not starting from the model of %s: %s", day, reason)
    return None


def _better_of(ws: Workspace, spec: Spec, day: str) -> Manifest | None:
    """What trained the day's model: the challenger's manifest where the day's model had fallen behind it."""
    if spec.challenger is not None:
        challenger = Manifest.load(ws.manifest(spec.pipeline, day, "challenger"))
        behind = None if challenger is None else challenger.facts.get("behind")
        if behind is not None and behind > spec.challenger.behind:
            return challenger
    return Manifest.load(ws.manifest(spec.pipeline, day, "train"))


def misfit(meta: dict[str, Any], spec: Spec, schema: DatasetSchema) -> str | None:
    """Why a saved model (its model.json) cannot be a start for this spec and dataset; None where it can."""
    ours = spec.model.model_dump(mode="json", by_alias=True)
    # Settings that an older version did not have are at their defaults.
    theirs = Model.model_validate(meta.get("model", {})).model_dump(mode="json", by_alias=True)
    for key in ours.keys() | theirs.keys():
        if ours.get(key) != theirs.get(key):
            return f"its model.{key} is {theirs.get(key)}, now {ours.get(key)}"
    tasks = [list(given) for given in (meta.get("tasks", {}), spec.train.tasks)]
    if tasks[0] != tasks[1]:
        return f"its tasks are {tasks[0]}, now {tasks[1]}"
    old = DatasetSchema.model_validate(meta["schema"])
    if [f.name for f in old.of(Kind.CONTINUOUS)] != [f.name for f in schema.of(Kind.CONTINUOUS)]:
        return "its continuous features are others"
    before = {f.name: f for f in old.of(Kind.CATEGORICAL)}
    now = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    if list(before) != list(now):
        return "its categorical features are others"
    for name, f in now.items():
        if _form(before[name]) != _form(f):
            return f"its feature '{name}' has another form"
        if (before[name].cardinality or 0) > (f.cardinality or 0):
            return f"its vocabulary of '{name}' has {before[name].cardinality} codes, the dataset's {f.cardinality}"
    return None


def _form(f: Feature) -> tuple[str | None, int, bool, bool]:
    return f.vocabulary, f.length, f.is_list, f.dynamic
