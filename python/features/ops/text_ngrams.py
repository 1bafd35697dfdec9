"""text_ngrams: text to a list of hashed n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.types import OpError, ValueType, least
from headrace.udfs import arrow as native

if TYPE_CHECKING:
    from pyspark.sql import Column


class TextNgrams(Op):
    """The code of each `n` characters that follow each other: a list, to be ended by pad; the first `most` of a text.

    A code is 1 + xxhash64(gram) mod `buckets`, as hash_bucket's. A text of fewer than `n` characters is one gram, an
    empty or null one has none. Ill-formed UTF-8 counts as U+FFFD. Words that share grams share embedding rows: Huang et
    al., Learning Deep Structured Semantic Models (2013), section 3.2; Bojanowski et al., Enriching Word Vectors with
    Subword Information (2017).
    """

    name: ClassVar[str] = "text_ngrams"

    n: int = Field(default=3, ge=1, le=8)
    buckets: int = Field(ge=1, le=2**31 - 2)
    most: int | None = Field(default=None, ge=1, le=1_000_000)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name, value in inputs.items():
            if value.is_list or value.element != "string":
                raise OpError(f"column '{name}': takes text, not {value}")
        return {n: ValueType("code", is_list=True, cardinality=self.buckets + 1, most=self.most) for n in inputs}

    def reads(self, needed: int | None) -> int | None:
        return 1

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        from headrace.udfs import spark as native_spark

        out = {}
        for name, x in columns.items():
            # No more than the rest of the chain looks at.
            most = least(self.most, context.reads.get(name)) or 0
            grams = native_spark.ngrams(x, self.n, self.buckets, most)
            out[name] = F.coalesce(grams, F.array().cast("array<int>"))
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {
            name: native.ngrams(pc.fill_null(x, ""), self.n, self.buckets, self.most) for name, x in columns.items()
        }
