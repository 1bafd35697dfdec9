"""pad: lists to a fixed number of columns in a batch, of which what is stored has the values alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Pad(Op):
    """`length` elements of each list, 0 where it ends before; the chain's end. Lists of codes, raw ids or numbers.

    Of a longer list the first elements stay, or with `keep: last` the last (of a history in order of time, the newest).
    Elements stay in their order and padding comes after them, either way.

    A null or empty list is all padding. A null element is 0 as padding is, and keeps its place: in a multi-hot feature
    both add nothing to the sum.
    """

    name: ClassVar[str] = "pad"

    length: int = Field(ge=1, le=1024)
    keep: Literal["first", "last"] = "first"

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name, value in inputs.items():
            if not value.is_list or not (value.is_number or value.is_categorical):
                hint = "; put categorify, hash_bucket or raw_id before it" if value.is_list else ""
                raise OpError(f"column '{name}': takes lists of codes, raw ids or numbers, not {value}{hint}")
        return {name: replace(value, length=self.length) for name, value in inputs.items()}

    def reads(self, needed: int | None) -> int | None:
        return self.length if self.keep == "first" else None

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        def without_nulls(x: Column, element: str) -> Column:
            zero = F.lit(0).cast(element)
            given = F.coalesce(x, F.array().cast(f"array<{element}>"))
            return F.transform(given, lambda value: F.coalesce(value.cast(element), zero))

        out = {}
        for name, x in columns.items():
            element = {"code": "int", "id": "bigint"}.get(context.types[name].element, "double")
            skipped = F.greatest(F.size(x) - F.lit(self.length), F.lit(0))
            start = F.lit(1) if self.keep == "first" else F.lit(1) + skipped
            out[name] = without_nulls(F.slice(x, start, F.lit(self.length)), element)
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {name: self._truncate(x, context.types[name]) for name, x in columns.items()}

    def _truncate(self, x: pa.ListArray, input_type: ValueType) -> pa.ListArray:
        """Lists of at most `length` elements, nulls 0. What is behind a list's end is filled where a model wants it."""
        lengths = pc.fill_null(pc.list_value_length(x), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        elements = x.flatten()
        if pa.types.is_boolean(elements.type):
            elements = elements.cast(pa.int8())
        stored = input_type.arrow.value_type if input_type.is_categorical else pa.float64()
        elements = pc.fill_null(elements.cast(stored, safe=False), 0)
        kept = np.minimum(lengths, self.length)
        offsets = np.zeros(len(kept) + 1, np.int32)
        np.cumsum(kept, out=offsets[1:])
        if offsets[-1] < len(elements):
            starts = np.cumsum(lengths) - (kept if self.keep == "last" else lengths)
            elements = elements.take(pa.array(np.repeat(starts - offsets[:-1], kept) + np.arange(offsets[-1])))
        return pa.ListArray.from_arrays(pa.array(offsets), elements)
