"""The day on whose rows each later day's model is measured (`retrain.forgetting_day`): what the models forget.

A measurement beside the training: it is no input of it, and where it cannot be made, training goes on without.
"""

from __future__ import annotations

import logging

from headrace.config import Spec
from headrace.dataset.parquet.layout import open_split
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.workspace import Workspace

log = logging.getLogger("headrace.train")


def forgetting_day(spec: Spec, ds: str) -> str | None:
    """The day on whose rows the model of `ds` is to be measured, too; None: on no other day's."""
    day = None if spec.retrain is None else spec.retrain.forgetting_day
    return None if day is None or day >= ds else day


def find_forgetting_dataset(ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema | None) -> str | None:
    """The name in the workspace of the dataset of that day, where it is there and its codes mean the same.

    A dataset that is asked for and cannot be measured on is named in the log with the reason.
    """
    day = forgetting_day(spec, ds)
    if day is None or schema is None:
        return None
    try:
        manifest = Manifest.load(ws.manifest(spec.pipeline, day, "features"))
        reason = "there is no dataset of that day" if manifest is None else _misfit(ws, manifest, schema)
    except UserError as e:
        reason = str(e)
    if reason is not None or manifest is None:
        log.warning("not measured on the rows of %s: %s", day, reason)
        return None
    return manifest.output("dataset").name


def _misfit(ws: Workspace, manifest: Manifest, schema: DatasetSchema) -> str | None:
    """Why the model of a dataset cannot be measured on that of an earlier manifest; None where it can.

    Raises:
        UserError: the split valid is missing or damaged.
    """
    if manifest.removed:
        return manifest.why_removed
    before = manifest.dataset_schema
    if before is None or [_form(f) for f in _features(before)] != [_form(f) for f in _features(schema)]:
        return "its dataset has other features"
    for old, new in zip(_features(before), _features(schema), strict=True):
        if (old.cardinality or 0) > (new.cardinality or 0):
            return f"its vocabulary of '{old.name}' has {old.cardinality} codes, the model's {new.cardinality}"
    rows = open_split(ws.locate(manifest.output("dataset").name), "valid", schema).rows
    return None if rows else "its split valid has no rows"


def _features(schema: DatasetSchema) -> list[Feature]:
    return [f for f in schema.features if f.kind is not Kind.CARRIED]


def _form(f: Feature) -> tuple[object, ...]:
    return f.name, f.kind, f.length, f.is_list, f.vocabulary, f.dynamic
