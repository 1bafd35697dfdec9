"""Keys of one or several columns as one text: the same in both engines, different for different values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Types whose values have one spelling as text.
KEY_TYPES = ("string", "int", "bigint", "boolean")


def check_keys(inputs: Mapping[str, ValueType]) -> None:
    """Raises OpError for a column that cannot be a key: a list, or a number with more than one spelling."""
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
