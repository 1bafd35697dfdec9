"""The row operators by name. To add one, write a class in the module of its family and name it here."""

from __future__ import annotations

from headrace.features.ops.base import Op
from headrace.plugins import Seam

_PACKAGE = __name__
#: A chain's `ops`. One operator a line, so that two additions do not meet.
OPERATORS = Seam(
    "headrace.operators",
    "operator",
    Op,
    {
        "age": f"{_PACKAGE}.times:Age",
        "bucketize": f"{_PACKAGE}.bins:Bucketize",
        "categorify": f"{_PACKAGE}.categories:Categorify",
        "clip": f"{_PACKAGE}.numbers:Clip",
        "column_similarity": f"{_PACKAGE}.lists:ColumnSimilarity",
        "cyclic": f"{_PACKAGE}.times:Cyclic",
        "drop_low_cardinality": f"{_PACKAGE}.categories:DropLowCardinality",
        "feature_cross": f"{_PACKAGE}.hashing:FeatureCross",
        "fill_median": f"{_PACKAGE}.numbers:FillMedian",
        "fill_missing": f"{_PACKAGE}.numbers:FillMissing",
        "hash_bucket": f"{_PACKAGE}.hashing:HashBucket",
        "hashed_cross": f"{_PACKAGE}.hashing:HashedCross",
        "join_groupby": f"{_PACKAGE}.groups:JoinGroupby",
        "list_slice": f"{_PACKAGE}.lists:ListSlice",
        "log": f"{_PACKAGE}.numbers:Log",
        "minhash": f"{_PACKAGE}.hashing:MinHash",
        "normalize": f"{_PACKAGE}.numbers:Normalize",
        "normalize_minmax": f"{_PACKAGE}.numbers:NormalizeMinMax",
        "pad": f"{_PACKAGE}.lists:Pad",
        "quantile_bin": f"{_PACKAGE}.bins:QuantileBin",
        "raw_id": f"{_PACKAGE}.hashing:RawId",
        "reduce_dtype": f"{_PACKAGE}.numbers:ReduceDtype",
        "rename": f"{_PACKAGE}.rename:Rename",
        "target_encoding": f"{_PACKAGE}.groups:TargetEncoding",
        "text_ngrams": f"{_PACKAGE}.hashing:TextNgrams",
        "value_count": f"{_PACKAGE}.groups:ValueCount",
    },
)
