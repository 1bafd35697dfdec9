"""raw_id: values as 64-bit ids, for a table that needs no vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.ids import arrow_hashes, arrow_ids, spark_hashed
from headrace.features.ops.base import Elementwise, State
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class RawId(Elementwise):
    """Integers as they are, text by xxhash64 of its UTF-8 bytes: int64, 0 for null. The chain's end, or before `pad`.

    The feature has no vocabulary and no cardinality: `train.embeddings.dynamic` says which ids get a row. An integer 0
    cannot be told from null; with `hash` integers are hashed too, and only a value whose hash is 0 could be taken for
    null (of 2^64). Two texts share an id if their hashes meet, which among n of them has a chance of about n^2 / 2^65.
    """

    name: ClassVar[str] = "raw_id"

    #: Hash integers as well.
    hash: bool = False

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.element not in ("string", "int", "bigint"):
            raise OpError(f"takes text and integers, not {input_type}")
        return replace(input_type, element="id")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        key = spark_hashed(x, input_type)
        found = F.xxhash64(key) if input_type.element == "string" or self.hash else key
        return F.when(x.isNull(), F.lit(0).cast("bigint")).otherwise(found)

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        valid = x.is_valid().to_numpy(zero_copy_only=False)
        if input_type.element == "string" or self.hash:
            ids = arrow_hashes(x, input_type)
        else:
            ids = pc.fill_null(arrow_ids(x, input_type), 0).to_numpy(zero_copy_only=False)
        return pa.array(np.where(valid, ids, 0).astype(np.int64))
