"""The day on whose rows each later day's model is measured (`retrain.forgetting_day`): what the models forget."""

from __future__ import annotations

import logging

from headrace.config import Spec
from headrace.manifest import Input, Manifest
from headrace.schema import DatasetSchema, Kind
from headrace.workspace import Workspace

log = logging.getLogger("headrace.train")

#: The kind of a manifest's input.
FORGETTING = "forgetting"


def find_forgetting_rows(ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema | None) -> tuple[Input, ...]:
    """The dataset of that day, where `ds` is later and its features are the same; codes keep their meaning."""
    day = None if spec.retrain is None else spec.retrain.forgetting_day
    manifest = None if day is None or day >= ds else Manifest.load(ws.manifest(spec.pipeline, day, "features"))
    if manifest is None or schema is None:
        return ()
    before = manifest.dataset_schema
    if before is None or _features(before) != _features(schema):
        log.info("not measured on the rows of %s: its dataset has other features", day)
        return ()
    output = manifest.output("dataset")
    return (Input(kind=FORGETTING, name=output.name, version=output.version),)


def _features(schema: DatasetSchema) -> list[tuple[object, ...]]:
    return [(f.name, f.kind, f.length, f.is_list, f.vocabulary) for f in schema.features if f.kind is not Kind.CARRIED]
