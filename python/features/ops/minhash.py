"""minhash: a list as a fixed number of codes that similar lists share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.features.functions.ids import arrow_ids, check_ids, spark_ids
from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.types import OpError, ValueType
from headrace.udfs import arrow as native

if TYPE_CHECKING:
    from pyspark.sql import Column


class MinHash(Op):
    """`length` codes 1..`buckets` of a list as a set; a code for all of its elements at once. The chain's end.

    Number j of the list's MinHash signature, into buckets: two lists share code j with the probability of their Jaccard
    similarity (and by chance, 1/buckets), so a list never seen before meets embedding rows of lists like it. 0 where
    the list has no element. Broder, On the resemblance and containment of documents (1997); Das et al., Google News
    Personalization (2007), used it for users by their clicks. Elements are text, integers, booleans or codes; null ones
    are left out, order and repetition do not matter.
    """

    name: ClassVar[str] = "minhash"

    length: int = Field(ge=1, le=1024)
    buckets: int = Field(ge=1, le=2**31 - 2)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name, value in inputs.items():
            check_ids(name, value)
            if not value.is_list:
                raise OpError(f"column '{name}': takes lists, not {value}")
        code = ValueType("code", is_list=True, length=self.length, cardinality=self.buckets + 1)
        return dict.fromkeys(inputs, code)

    def reads(self, needed: int | None) -> int | None:
        return None

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        from headrace.udfs import spark as native_spark

        def code(least_hash: Column) -> Column:
            return (F.pmod(least_hash, F.lit(self.buckets).cast("bigint")) + F.lit(1).cast("bigint")).cast("int")

        nothing = F.array_repeat(F.lit(0), self.length)
        return {
            name: F.coalesce(
                F.transform(native_spark.minhash(spark_ids(x, context.types[name]), self.length), code), nothing
            )
            for name, x in columns.items()
        }

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {name: self._codes(arrow_ids(x, context.types[name])) for name, x in columns.items()}

    def _codes(self, ids: pa.Array) -> pa.FixedSizeListArray:
        signatures = native.minhash(ids, self.length)
        there = np.repeat(signatures.is_valid().to_numpy(zero_copy_only=False), self.length)
        codes = np.where(there, signatures.values.to_numpy() % self.buckets + 1, 0).astype(np.int32)
        return pa.FixedSizeListArray.from_arrays(pa.array(codes), self.length)
