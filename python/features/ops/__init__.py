"""The operators by name. One more is one class in one file, and its two lines here."""

from __future__ import annotations

from headrace.features.ops.base import Op
from headrace.features.ops.bins import Bucketize, QuantileBin
from headrace.features.ops.categories import Categorify, DropLowCardinality
from headrace.features.ops.groups import JoinGroupby, TargetEncoding, ValueCount
from headrace.features.ops.hashing import FeatureCross, HashBucket, HashedCross, MinHash, RawId, TextNgrams
from headrace.features.ops.lists import ColumnSimilarity, ListSlice, Pad
from headrace.features.ops.missing import FillMedian, FillMissing
from headrace.features.ops.numbers import Clip, Log, Normalize, NormalizeMinMax, ReduceDtype
from headrace.features.ops.rename import Rename
from headrace.features.ops.times import Age, Cyclic

#: One operator a line, so that two additions do not meet.
_ALL: tuple[type[Op], ...] = (
    FillMissing,
    Clip,
    Log,
    Normalize,
    Bucketize,
    Categorify,
    HashBucket,
    HashedCross,
    RawId,
    Cyclic,
    Age,
    ListSlice,
    ColumnSimilarity,
    TextNgrams,
    FeatureCross,
    MinHash,
    Pad,
    ReduceDtype,
    Rename,
    DropLowCardinality,
    FillMedian,
    JoinGroupby,
    NormalizeMinMax,
    QuantileBin,
    TargetEncoding,
    ValueCount,
)

REGISTRY: dict[str, type[Op]] = {op.name: op for op in _ALL}
