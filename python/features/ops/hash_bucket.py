"""hash_bucket: values to a fixed number of codes, with nothing to learn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.features.functions.ids import arrow_hashes, spark_hashed
from headrace.features.ops.base import Elementwise, State
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class HashBucket(Elementwise):
    """xxhash64(x) mod `buckets`, and one: codes 1..buckets, 0 for null. Text by its UTF-8 bytes, integers as bigint."""

    name: ClassVar[str] = "hash_bucket"

    buckets: int = Field(ge=1, le=2**31 - 2)

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.element not in ("string", "int", "bigint", "boolean"):
            raise OpError(f"takes text, integers and booleans, not {input_type}")
        return replace(input_type, element="code", cardinality=self.buckets + 1)

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        hashes = F.xxhash64(spark_hashed(x, input_type))
        bucket = F.pmod(hashes, F.lit(self.buckets).cast("bigint")) + F.lit(1).cast("bigint")
        return F.when(x.isNull(), F.lit(0)).otherwise(bucket.cast("int"))

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        valid = x.is_valid().to_numpy(zero_copy_only=False)
        return pa.array(np.where(valid, arrow_hashes(x, input_type) % self.buckets + 1, 0).astype(np.int32))
