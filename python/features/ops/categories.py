"""Operators over vocabularies: categorify gives codes, drop_low_cardinality leaves small features out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.config.schema import NULL_CODE, OOV_CODE
from headrace.features.functions.arrays import with_elements
from headrace.features.learn.statistics import Statistic
from headrace.features.ops.base import ArrowOpContext, EstimatorOp, Op, SparkOpContext
from headrace.features.types import OpError, ValueType
from headrace.features.vocabulary.codes import VocabularyRule

if TYPE_CHECKING:
    from pyspark.sql import Column

    from headrace.features.vocabulary.lookup import Codes


class Categorify(EstimatorOp):
    """A code for each value: 0 for null, 1 for one that the vocabulary lacks, from 2 the values, the same for ever.

    With `oov_buckets: n`, values that the vocabulary lacks have codes 1..n by their hash (xxhash64 of the text, mod n,
    and 1), and the vocabulary begins at n + 1: in front of it, so that it can grow for ever. n cannot change later.

    Takes text, integers and booleans (and lists of them); other numbers have no one spelling. The empty text is a
    value. Integers and texts of the same spelling are one value, so columns of both types can share a vocabulary.
    """

    name: ClassVar[str] = "categorify"
    onnx: ClassVar[str] = "headrace.export.features.codes:categorify"
    learns: ClassVar[bool] = True
    unrolls: ClassVar[bool] = True
    by_value: ClassVar[bool] = True

    #: Values seen fewer times in the training range get no code (yet).
    min_count: int = Field(default=1, ge=1)
    #: At most this many values, the most frequent first come.
    max_size: int | None = Field(default=None, ge=1)
    #: Codes for what the vocabulary lacks.
    oov_buckets: int = Field(default=1, ge=1, le=2**30)
    #: One vocabulary for all columns that name it; else each column has its own, of its name.
    vocabulary: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")

    def vocabulary_of(self, column: str) -> str:
        """Return the name of a column's vocabulary."""
        return self.vocabulary or column

    @property
    def rule(self) -> VocabularyRule:
        return VocabularyRule(self.min_count, self.max_size, self.oov_buckets)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        out = {}
        for name, value in inputs.items():
            if value.element not in ("string", "int", "bigint", "boolean"):
                raise OpError(f"column '{name}': takes text, integers and booleans, not {value}")
            out[name] = replace(value, element="code", vocabulary=self.vocabulary_of(name))
        return out

    def vocabularies(self, inputs: Mapping[str, ValueType]) -> dict[str, VocabularyRule]:
        return {self.vocabulary_of(name): self.rule for name in inputs}

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        def code(vocabulary: str, x: Column) -> Column:
            # Casting integers and booleans to string gives the spelling that the vocabulary has.
            key = x.cast("string")
            bucket = F.lit(OOV_CODE)
            if self.oov_buckets > 1:
                bucket = (F.pmod(F.xxhash64(key), F.lit(self.oov_buckets).cast("bigint")) + F.lit(1)).cast("int")
            known_or_bucket = F.coalesce(context.lookup(vocabulary, key), bucket)
            return F.when(x.isNull(), F.lit(NULL_CODE)).otherwise(known_or_bucket).cast("int")

        out = {}
        for name, x in columns.items():
            vocabulary = self.vocabulary_of(name)
            if context.types[name].is_list:
                # A join cannot look into a list: one for each element that is used, all on one broadcast table.
                width = context.reads[name]
                assert width is not None  # Workflow has seen to it
                codes = F.array(*[code(vocabulary, F.get(x, F.lit(i))) for i in range(width)])
                out[name] = F.slice(codes, 1, F.least(F.size(x), F.lit(width)))
            else:
                out[name] = code(vocabulary, x)
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, x in columns.items():
            lookup = context.lookup(self.vocabulary_of(name))
            if context.types[name].is_list:
                out[name] = with_elements(x, pa.array(self._bucketed(lookup.codes(x.flatten()), x.flatten())))
            else:
                out[name] = pa.array(self._bucketed(lookup.codes(x), x))
        return out

    def _bucketed(self, codes: Codes, x: pa.Array) -> Codes:
        """Return codes with those of values that the vocabulary lacks put into buckets."""
        if self.oov_buckets == 1:
            return codes
        from headrace.udfs.arrow import xxhash64_strings

        unknown_rows = np.flatnonzero(codes == OOV_CODE)
        texts = x.take(pa.array(unknown_rows)).cast(pa.string())
        codes = codes.copy()
        codes[unknown_rows] = OOV_CODE + xxhash64_strings(texts) % self.oov_buckets
        return codes

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        """Count each value and find its first day. Merged by vocabulary, the counts are the input of `Vocabularies`."""
        return {name: Statistic(key=(name,), day=True) for name in types}


class DropLowCardinality(Op):
    """Codes of `categorify` as they are; those whose vocabulary is small are left out of the dataset after the fit.

    A feature stays when its vocabulary has at least `min_cardinality` values (null and out-of-vocabulary are none).
    Since vocabularies only grow, what was kept stays; what was left out comes on the day that its vocabulary is large
    enough. Columns that share a vocabulary stay or go together. NVTabular's DropLowCardinality.
    """

    name: ClassVar[str] = "drop_low_cardinality"
    onnx: ClassVar[str] = "headrace.export.features.operators:drop_low_cardinality"
    by_value: ClassVar[bool] = True

    min_cardinality: int = Field(default=2, ge=1)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        from dataclasses import replace

        out = {}
        for name, value in inputs.items():
            if value.element != "code" or value.vocabulary is None:
                raise OpError(f"column '{name}': takes codes of a vocabulary, not {value}; put categorify before it")
            out[name] = replace(value, min_cardinality=max(self.min_cardinality, value.min_cardinality))
        return out

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        return dict(columns)

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return dict(columns)
