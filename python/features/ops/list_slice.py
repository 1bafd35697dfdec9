"""list_slice: a part of each list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.types import OpError, ValueType, least

if TYPE_CHECKING:
    from pyspark.sql import Column


class ListSlice(Op):
    """`length` elements of each list, fewer where it has fewer; lists of any type, the same type out.

    keep first: elements `start` .. `start + length - 1`. keep last: the same counted from the end, in their order: of a
    history in order of time, its newest. NVTabular's ListSlice, whose negative start is `keep: last`.
    """

    name: ClassVar[str] = "list_slice"

    start: int = Field(default=0, ge=0)
    length: int = Field(ge=1)
    keep: Literal["first", "last"] = "first"

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        for name, value in inputs.items():
            if not value.is_list:
                raise OpError(f"column '{name}': takes lists, not {value}")
        return {name: replace(value, most=least(self.length, value.most)) for name, value in inputs.items()}

    def reads(self, needed: int | None) -> int | None:
        if self.keep == "last":
            return None
        return self.start + (self.length if needed is None else min(needed, self.length))

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        if self.keep == "first":
            return {name: F.slice(x, self.start + 1, self.length) for name, x in columns.items()}
        out = {}
        for name, x in columns.items():
            # Where the part ends, and where it begins; of a short list less is left, perhaps nothing.
            end = F.size(x) - F.lit(self.start)
            first = F.greatest(end - F.lit(self.length), F.lit(0))
            out[name] = F.slice(x, first + F.lit(1), F.greatest(end - first, F.lit(0)))
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {name: self._slice(x) for name, x in columns.items()}

    def _slice(self, x: pa.ListArray) -> pa.ListArray:
        lengths = pc.list_value_length(x).to_numpy(zero_copy_only=False).astype(np.int64)
        # Of each element in its list, from the end that counts.
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if self.keep == "last":
            place = np.repeat(lengths, lengths) - 1 - place
        kept = x.flatten().filter(pa.array((place >= self.start) & (place < self.start + self.length)))
        offsets = np.concatenate([[0], np.cumsum(np.clip(lengths - self.start, 0, self.length))]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), kept)
