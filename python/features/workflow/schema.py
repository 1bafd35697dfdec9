"""A dataset's schema as Arrow's: of its Parquet files, and of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headrace.schema import Feature, Kind

_PHYSICAL = {
    "float32": pa.float32(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


def stored_schema(features: Sequence[Feature]) -> pa.Schema:
    """Arrow fields of the Parquet columns, a list one of them; only carried columns may have nulls."""

    def type_of(f: Feature) -> pa.DataType:
        plain = _PHYSICAL[f.dtype]
        return pa.list_(pa.field("element", plain, nullable=False)) if f.is_list else plain

    return pa.schema([pa.field(f.name, type_of(f), nullable=f.kind is Kind.CARRIED) for f in features])


def physical_schema(features: Sequence[Feature]) -> pa.Schema:
    """Arrow fields of the columns that features have in a batch, a list padded; only carried columns may have nulls."""
    return pa.schema(
        [
            pa.field(column, _PHYSICAL[f.dtype], nullable=f.kind is Kind.CARRIED)
            for f in features
            for column in f.physical
        ]
    )
