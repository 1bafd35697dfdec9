"""Operators over lists: list_slice, pad, column_similarity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from headrace.compute import pc
from headrace.features.functions.arrays import from_numpy
from headrace.features.ops.base import ArrowOpContext, NewName, Op, SparkOpContext
from headrace.features.types import OpError, ValueType, least

if TYPE_CHECKING:
    from pyspark.sql import Column


class ListSlice(Op):
    """`length` elements of each list, fewer where it has fewer; lists of any type, the same type out.

    keep first: elements `start` .. `start + length - 1`. keep last: the same counted from the end, in their order: of a
    history in order of time, its newest. NVTabular's ListSlice, whose negative start is `keep: last`.
    """

    name: ClassVar[str] = "list_slice"
    onnx: ClassVar[str] = "headrace.export.features.operators:list_slice"

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
        elements = x.flatten().filter(pa.array((place >= self.start) & (place < self.start + self.length)))
        offsets = np.concatenate([[0], np.cumsum(np.clip(lengths - self.start, 0, self.length))]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), elements)


class Pad(Op):
    """`length` elements of each list, 0 where it ends before; the chain's end. Lists of codes, raw ids or numbers.

    Of a longer list the first elements stay, or with `keep: last` the last (of a history in order of time, the newest).
    Elements stay in their order and padding comes after them, either way.

    A null or empty list is all padding. A null element is 0 as padding is, and keeps its place: in a multi-hot feature
    both add nothing to the sum.
    """

    name: ClassVar[str] = "pad"
    onnx: ClassVar[str] = "headrace.export.features.operators:pad"

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
            elements = F.coalesce(x, F.array().cast(f"array<{element}>"))
            return F.transform(elements, lambda value: F.coalesce(value.cast(element), zero))

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
        """Return lists of at most `length` elements, nulls 0. What is behind a list's end is filled where a model wants
        it.
        """
        lengths = pc.fill_null(pc.list_value_length(x), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        elements = x.flatten()
        if pa.types.is_boolean(elements.type):
            elements = elements.cast(pa.int8())
        stored = input_type.arrow.value_type if input_type.is_categorical else pa.float64()
        elements = pc.fill_null(elements.cast(stored, safe=False), 0)
        stored_lengths = np.minimum(lengths, self.length)
        offsets = np.zeros(len(stored_lengths) + 1, np.int32)
        np.cumsum(stored_lengths, out=offsets[1:])
        if offsets[-1] < len(elements):
            starts = np.cumsum(lengths) - (stored_lengths if self.keep == "last" else lengths)
            elements = elements.take(
                pa.array(np.repeat(starts - offsets[:-1], stored_lengths) + np.arange(offsets[-1]))
            )
        return pa.ListArray.from_arrays(pa.array(offsets), elements)


Counts = NDArray[np.int64]


class ColumnSimilarity(Op):
    """The similarity of the chain's two lists, taken as sets of their values (nulls are no values): a double, 0 to 1.

    jaccard: |A and B| / |A or B|; cosine: |A and B| / sqrt(|A| |B|); overlap: |A and B| / min(|A|, |B|). Missing where
    one of the sets is empty. Lists of text or integers in; out one column `<a>_<b>_similarity`, or `to`. NVTabular's
    ColumnSimilarity compares rows of given sparse matrices instead; with a user's and an item's tags as lists, this is
    the same without the matrices. Sizes are whole numbers, so both engines agree to the bit.
    """

    name: ClassVar[str] = "column_similarity"

    metric: Literal["jaccard", "cosine", "overlap"] = "jaccard"
    #: The name of the column that comes out.
    to: NewName | None = None

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if len(inputs) != 2:
            raise OpError(f"compares two columns, here are {', '.join(inputs) or 'none'}")
        for name, value in inputs.items():
            if not value.is_list or value.element not in ("string", "int", "bigint"):
                raise OpError(f"column '{name}': takes lists of text or integers, not {value}")
        a, b = inputs.values()
        if (a.element == "string") != (b.element == "string"):
            raise OpError(f"cannot compare {a} with {b}")
        return {self._named(inputs): ValueType("double")}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {self._named(inputs): tuple(inputs)}

    def reads(self, needed: int | None) -> int | None:
        return None

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        text = next(iter(context.types.values())).element == "string"
        a, b = (F.filter(x if text else x.cast("array<bigint>"), lambda v: v.isNotNull()) for x in columns.values())
        # A list's intersection with itself is its set.
        n, m, both = (F.size(F.array_intersect(*pair)).cast("double") for pair in ((a, a), (b, b), (a, b)))
        if self.metric == "jaccard":
            under = n + m - both
        elif self.metric == "cosine":
            under = F.sqrt(n * m)
        else:
            under = F.least(n, m)
        return {self._named(context.types): F.when((n > 0) & (m > 0), both / under)}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        x, y = columns.values()
        n, m, both = set_sizes(x, y)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.metric == "jaccard":
                under = (n + m - both).astype(np.float64)
            elif self.metric == "cosine":
                under = np.sqrt(n.astype(np.float64) * m.astype(np.float64))
            else:
                under = np.minimum(n, m).astype(np.float64)
            similarity: NDArray[Any] = np.where((n > 0) & (m > 0), both.astype(np.float64) / under, np.nan)
        return {self._named(context.types): from_numpy(similarity)}

    def _named(self, inputs: Mapping[str, ValueType]) -> str:
        return self.to or f"{'_'.join(inputs)}_similarity"


def set_sizes(x: pa.ListArray, y: pa.ListArray) -> tuple[Counts, Counts, Counts]:
    """Count by row the distinct values of x, of y, and those in common. Lists [n] -> int64 [n] each."""
    rows = len(x)
    flat = [a.flatten() for a in (x, y)]
    if not pa.types.is_string(flat[0].type):
        flat = [a.cast(pa.int64()) for a in flat]
    encoded = pa.concat_arrays(flat).dictionary_encode()
    width = max(len(encoded.dictionary), 1)
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    sets = []
    for lists, list_codes in ((x, codes[: len(flat[0])]), (y, codes[len(flat[0]) :])):
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(rows), lengths)
        # A row and a value as one number: below rows * distinct values, far from 2**63.
        sets.append(np.unique((row * width + list_codes)[list_codes >= 0]))
    common = np.intersect1d(sets[0], sets[1], assume_unique=True)
    a, b, both = (np.bincount(s // width, minlength=rows).astype(np.int64) for s in (*sets, common))
    return a, b, both
