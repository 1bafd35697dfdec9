"""Values as 64-bit ids, as hashes, and several columns as one key: the same in both engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.compute import pc
from headrace.features.functions.arrays import with_elements
from headrace.features.types import OpError, ValueType, element_of
from headrace.udfs.arrow import I64, xxhash64_integers, xxhash64_strings

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Types that have ids.
WITH_IDS = ("string", "int", "bigint", "boolean", "code")


def check_ids(name: str, input_type: ValueType) -> None:
    """Raise OpError for a column whose values have no ids."""
    if input_type.element not in WITH_IDS:
        raise OpError(f"column '{name}': takes text, integers, booleans and codes, not {input_type}")


def spark_ids(x: Column, input_type: ValueType) -> Column:
    """Return bigint, or array<bigint> of a list."""
    from pyspark.sql import functions as F

    if input_type.is_list:
        element = element_of(input_type)
        return x if element.element == "bigint" else F.transform(x, lambda e: spark_ids(e, element))
    if input_type.element == "string":
        return F.when(x.isNotNull(), F.xxhash64(x))
    return (x.cast("int") if input_type.element == "boolean" else x).cast("bigint")


def arrow_ids(x: pa.Array, input_type: ValueType) -> pa.Array:
    """Return int64, or list<int64> of a list without null lists."""
    if input_type.is_list:
        return with_elements(x, arrow_ids(x.flatten(), element_of(input_type)))
    if input_type.element == "string":
        return pa.array(xxhash64_strings(x), mask=x.is_null().to_numpy(zero_copy_only=False))
    return (x.cast(pa.int8()) if input_type.element == "boolean" else x).cast(pa.int64())


def spark_hashed(x: Column, input_type: ValueType) -> Column:
    """Return a scalar as Spark's `xxhash64` takes it: text as it is, others as bigint."""
    return x if input_type.element == "string" else spark_ids(x, input_type)


def arrow_hashes(x: pa.Array, input_type: ValueType, seed: I64 | None = None) -> I64:
    """`xxhash64` of scalars, of a null any number. [n] -> int64 [n]. `seed`: see headrace.udfs.arrow."""
    if input_type.element == "string":
        return xxhash64_strings(x, seed)
    return xxhash64_integers(pc.fill_null(arrow_ids(x, input_type), 0).to_numpy(zero_copy_only=False), seed)


#: Types whose values have one spelling as text.
KEY_TYPES = ("string", "int", "bigint", "boolean")


def check_keys(inputs: Mapping[str, ValueType]) -> None:
    """Raise OpError for a column that cannot be a key: a list, or a number with more than one spelling."""
    for name, value in inputs.items():
        if value.is_list or (value.element not in KEY_TYPES and not (value.element == "code" and not value.vocabulary)):
            raise OpError(f"column '{name}': a key is text, an integer, a boolean or a hash_bucket's code, not {value}")


def joint_key(columns: Sequence[pa.Array]) -> pa.Array:
    """One column as it is; several as text, each but the last behind its length: 'ab', 'c' is '2:abc'.

    Null where one of them is.
    """
    if len(columns) == 1:
        return columns[0]
    texts = [x.cast(pa.string()) for x in columns]
    parts = []
    for text in texts[:-1]:
        parts += [pc.utf8_length(text).cast(pa.string()), pa.scalar(":"), text]
    return pc.binary_join_element_wise(*parts, texts[-1], "")


def spark_joint_key(columns: Sequence[Column]) -> Column:
    """`joint_key` as a Spark expression; one column as text too."""
    from pyspark.sql import functions as F

    texts = [x.cast("string") for x in columns]
    parts: list[Column] = []
    for text in texts[:-1]:
        parts += [F.char_length(text).cast("string"), F.lit(":"), text]
    return F.concat(*parts, texts[-1]) if parts else texts[0]
