"""Whether the rows of an older day's dataset mean the same to a model of today."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dataset.parquet.layout import open_split
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.workspace import Workspace


def misfit(ws: Workspace, manifest: Manifest | None, schema: DatasetSchema, carried: Sequence[str] = ()) -> str | None:
    """Why the split `valid` of an older dataset is not what a model can be shown; None where it is.

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
    before = manifest.dataset_schema
    if before is None or [_form(f) for f in _features(before)] != [_form(f) for f in _features(schema)]:
        return "its dataset has other features"
    for old, new in zip(_features(before), _features(schema), strict=True):
        if (old.cardinality or 0) > (new.cardinality or 0):
            return f"its vocabulary of '{old.name}' has {old.cardinality} codes, the model's {new.cardinality}"
    there = {f.name for f in before.of(Kind.CARRIED)}
    for name in carried:
        if name not in there:
            return f"it carries no column '{name}'"
    try:
        rows = open_split(ws.locate(manifest.output("dataset").name), "valid", schema).rows
    except UserError as e:
        return str(e)
    return None if rows else "its split valid has no rows"


def _features(schema: DatasetSchema) -> list[Feature]:
    return [f for f in schema.features if f.kind is not Kind.CARRIED]


def _form(f: Feature) -> tuple[object, ...]:
    return f.name, f.kind, f.length, f.is_list, f.vocabulary, f.dynamic
