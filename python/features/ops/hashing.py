"""Operators that hash values: hash_bucket, raw_id, hashed_cross, feature_cross, minhash, text_ngrams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.compute import pc
from headrace.features.functions.keys import arrow_hashes, arrow_ids, check_ids, spark_hashed, spark_ids
from headrace.features.ops.base import ArrowOpContext, Elementwise, NewName, Op, SparkOpContext, State
from headrace.features.types import OpError, ValueType, least
from headrace.udfs import arrow as native
from headrace.udfs.library import MOST_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column


class HashBucket(Elementwise):
    """xxhash64(x) mod `buckets`, and one: codes 1..buckets, 0 for null. Text by its UTF-8 bytes, integers as bigint."""

    name: ClassVar[str] = "hash_bucket"
    onnx: ClassVar[str] = "headrace.export.features.codes:hash_bucket"

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


class RawId(Elementwise):
    """Integers as they are, text by xxhash64 of its UTF-8 bytes: int64, 0 for null. The chain's end, or before `pad`.

    The feature has no vocabulary and no cardinality: `train.embeddings.dynamic` says which ids get a row. An integer 0
    cannot be told from null; with `hash` integers are hashed too, and only a value whose hash is 0 could be taken for
    null (of 2^64). Two texts share an id if their hashes meet, which among n of them has a chance of about n^2 / 2^65.
    """

    name: ClassVar[str] = "raw_id"
    onnx: ClassVar[str] = "headrace.export.features.codes:raw_id"

    #: Hash integers as well.
    hash: bool = False

    def type_of(self, input_type: ValueType) -> ValueType:
        if input_type.element not in ("string", "int", "bigint"):
            raise OpError(f"takes text and integers, not {input_type}")
        return replace(input_type, element="id")

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        from pyspark.sql import functions as F

        key = spark_hashed(x, input_type)
        ids = F.xxhash64(key) if input_type.element == "string" or self.hash else key
        return F.when(x.isNull(), F.lit(0).cast("bigint")).otherwise(ids)

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        valid = x.is_valid().to_numpy(zero_copy_only=False)
        if input_type.element == "string" or self.hash:
            ids = arrow_hashes(x, input_type)
        else:
            ids = pc.fill_null(arrow_ids(x, input_type), 0).to_numpy(zero_copy_only=False)
        return pa.array(np.where(valid, ids, 0).astype(np.int64))


class HashedCross(Op):
    """xxhash64(a, b, ...) mod `buckets`, and one: a code 1..buckets for each combination of the chain's columns.

    Text, integers and booleans in (no lists; integers as bigint, booleans as 0 and 1), one code out, named `a_X_b_X_..`
    or `to`. 0 where one of the columns is null: of a combination nothing is known then (fill_missing before it makes
    null a value). The order of the columns matters. The hash of several columns is Spark's: each column is hashed with
    the hash of those before it as its seed. The feature cross of Cheng et al., Wide & Deep Learning (2016), hashed as
    by NVTabular's HashedCross.
    """

    name: ClassVar[str] = "hashed_cross"
    onnx: ClassVar[str] = "headrace.export.features.codes:hashed_cross"

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
            is_valid = x.is_valid().to_numpy(zero_copy_only=False)
            valid = is_valid if valid is None else valid & is_valid
            hashes = arrow_hashes(x, context.types[name], hashes)
        assert hashes is not None
        assert valid is not None
        codes = np.where(valid, hashes % self.buckets + 1, 0).astype(np.int32)
        return {self._named(context.types): pa.array(codes)}

    def _named(self, inputs: Mapping[str, ValueType]) -> str:
        return self.to or "_X_".join(inputs)


class FeatureCross(Op):
    """A code 1..`buckets` for each combination of one element of each column: a list, to be ended by pad.

    Two to eight columns of text, integers, booleans or codes, one of them a list (hashed_cross crosses scalars), one
    list of codes out, named `a_X_b_X_..` or `to`: the first `most` combinations, the last column's element changing
    fastest. None where a scalar is null or a list empty; null elements are left out. Text is hashed to an id first; the
    code is 1 + xxhash64(a, b, ...) mod `buckets` of the ids.
    """

    name: ClassVar[str] = "feature_cross"

    buckets: int = Field(ge=1, le=2**31 - 2)
    most: int = Field(default=64, ge=1, le=4096)
    #: The name of the column that comes out.
    to: NewName | None = None

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if not 2 <= len(inputs) <= MOST_COLUMNS:
            raise OpError(f"crosses 2 to {MOST_COLUMNS} columns, not {len(inputs)}")
        for name, value in inputs.items():
            check_ids(name, value)
        if not any(value.is_list for value in inputs.values()):
            raise OpError("none of the columns is a list; hashed_cross crosses scalars")
        output_type = ValueType("code", is_list=True, cardinality=self.buckets + 1, most=self.most)
        return {self._named(inputs): output_type}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {self._named(inputs): tuple(inputs)}

    def reads(self, needed: int | None) -> int | None:
        # Null elements are left out, so later ones may come first.
        return None

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        from headrace.udfs import spark as native_spark

        ids = [spark_ids(x, context.types[name]) for name, x in columns.items()]
        codes = native_spark.cross(ids, self.buckets, self.most)
        return {self._named(context.types): F.coalesce(codes, F.array().cast("array<int>"))}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        ids = [arrow_ids(x, context.types[name]) for name, x in columns.items()]
        codes = native.cross(ids, self.buckets, self.most)
        return {self._named(context.types): pc.fill_null(codes, []) if codes.null_count else codes}

    def _named(self, inputs: Mapping[str, ValueType]) -> str:
        return self.to or "_X_".join(inputs)


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

        empty_signature = F.array_repeat(F.lit(0), self.length)
        return {
            name: F.coalesce(
                F.transform(native_spark.minhash(spark_ids(x, context.types[name]), self.length), code), empty_signature
            )
            for name, x in columns.items()
        }

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {name: self._codes(arrow_ids(x, context.types[name])) for name, x in columns.items()}

    def _codes(self, ids: pa.Array) -> pa.FixedSizeListArray:
        signatures = native.minhash(ids, self.length)
        has_elements = np.repeat(signatures.is_valid().to_numpy(zero_copy_only=False), self.length)
        codes = np.where(has_elements, signatures.values.to_numpy() % self.buckets + 1, 0).astype(np.int32)
        return pa.FixedSizeListArray.from_arrays(pa.array(codes), self.length)


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
