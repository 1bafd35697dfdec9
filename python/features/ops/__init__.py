"""The operators by name. One more is one class in one file, and its two lines here."""

from __future__ import annotations

from headrace.features.ops.age import Age
from headrace.features.ops.base import Op
from headrace.features.ops.bucketize import Bucketize
from headrace.features.ops.categorify import Categorify
from headrace.features.ops.clip import Clip
from headrace.features.ops.column_similarity import ColumnSimilarity
from headrace.features.ops.cyclic import Cyclic
from headrace.features.ops.drop_low_cardinality import DropLowCardinality
from headrace.features.ops.feature_cross import FeatureCross
from headrace.features.ops.fill_median import FillMedian
from headrace.features.ops.fill_missing import FillMissing
from headrace.features.ops.hash_bucket import HashBucket
from headrace.features.ops.hashed_cross import HashedCross
from headrace.features.ops.join_groupby import JoinGroupby
from headrace.features.ops.list_slice import ListSlice
from headrace.features.ops.log import Log
from headrace.features.ops.minhash import MinHash
from headrace.features.ops.normalize import Normalize
from headrace.features.ops.normalize_minmax import NormalizeMinMax
from headrace.features.ops.pad import Pad
from headrace.features.ops.quantile_bin import QuantileBin
from headrace.features.ops.raw_id import RawId
from headrace.features.ops.reduce_dtype import ReduceDtype
from headrace.features.ops.rename import Rename
from headrace.features.ops.target_encoding import TargetEncoding
from headrace.features.ops.text_ngrams import TextNgrams
from headrace.features.ops.value_count import ValueCount

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
