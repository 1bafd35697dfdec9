"""The operators by name. One more is one class in one file, and its line here."""

from __future__ import annotations

from headrace.features.op import Op
from headrace.features.ops.categorify import Categorify
from headrace.features.ops.clip import Clip
from headrace.features.ops.fill_missing import FillMissing
from headrace.features.ops.hash_bucket import HashBucket
from headrace.features.ops.list_slice import ListSlice
from headrace.features.ops.log import Log
from headrace.features.ops.normalize import Normalize
from headrace.features.ops.pad import Pad

REGISTRY: dict[str, type[Op]] = {
    op.name: op for op in (FillMissing, Clip, Log, Normalize, Categorify, HashBucket, ListSlice, Pad)
}

__all__ = ["REGISTRY", "Categorify", "Clip", "FillMissing", "HashBucket", "ListSlice", "Log", "Normalize", "Pad"]
