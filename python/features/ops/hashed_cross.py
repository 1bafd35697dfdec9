"""hashed_cross: several columns as one, hashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.features.functions.ids import arrow_hashes, spark_hashed
from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.ops.rename import NewName
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class HashedCross(Op):
    """xxhash64(a, b, ...) mod `buckets`, and one: a code 1..buckets for each combination of the chain's columns.

    Text, integers and booleans in (no lists; integers as bigint, booleans as 0 and 1), one code out, named `a_X_b_X_..`
    or `to`. 0 where one of the columns is null: of a combination nothing is known then (fill_missing before it makes
    null a value). The order of the columns matters. The hash of several columns is Spark's: each column is hashed with
    the hash of those before it as its seed. The feature cross of Cheng et al., Wide & Deep Learning (2016), hashed as
    by NVTabular's HashedCross.
    """

    name: ClassVar[str] = "hashed_cross"

    buckets: int = Field(ge=1, le=2**31 - 2)
    #: The name of the column that comes out.
    to: NewName | None = None

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if len(inputs) < 2:
            raise OpError("crosses two columns or more; for one, hash_bucket does it")
        for name, value in inputs.items():
            if value.is_list or value.element not in ("string", "int", "bigint", "boolean"):
                raise OpError(f"column '{name}': takes text, integers and booleans, not {value}")
        return {self._named(inputs): ValueType("code", cardinality=self.buckets + 1)}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {self._named(inputs): tuple(inputs)}

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        keys, missing = [], F.lit(False)
        for name, x in columns.items():
            keys.append(spark_hashed(x, context.types[name]))
            missing = missing | x.isNull()
        bucket = F.pmod(F.xxhash64(*keys), F.lit(self.buckets).cast("bigint")) + F.lit(1).cast("bigint")
        return {self._named(context.types): F.when(missing, F.lit(0)).otherwise(bucket.cast("int"))}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        hashes, valid = None, None
        for name, x in columns.items():
            there = x.is_valid().to_numpy(zero_copy_only=False)
            valid = there if valid is None else valid & there
            hashes = arrow_hashes(x, context.types[name], hashes)
        assert hashes is not None
        assert valid is not None
        codes = np.where(valid, hashes % self.buckets + 1, 0).astype(np.int32)
        return {self._named(context.types): pa.array(codes)}

    def _named(self, inputs: Mapping[str, ValueType]) -> str:
        return self.to or "_X_".join(inputs)
