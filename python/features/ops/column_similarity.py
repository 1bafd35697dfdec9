"""column_similarity: how much two lists have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.features.functions.arrays import from_numpy
from headrace.features.ops.base import ArrowOpContext, Op, SparkOpContext
from headrace.features.ops.rename import NewName
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

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
            found: NDArray[Any] = np.where((n > 0) & (m > 0), both.astype(np.float64) / under, np.nan)
        return {self._named(context.types): from_numpy(found)}

    def _named(self, inputs: Mapping[str, ValueType]) -> str:
        return self.to or f"{'_'.join(inputs)}_similarity"


def set_sizes(x: pa.ListArray, y: pa.ListArray) -> tuple[Counts, Counts, Counts]:
    """By row: distinct values of x, of y, and of both together in common. Lists [n] -> int64 [n] each."""
    rows = len(x)
    flat = [a.flatten() for a in (x, y)]
    if not pa.types.is_string(flat[0].type):
        flat = [a.cast(pa.int64()) for a in flat]
    encoded = pa.concat_arrays(flat).dictionary_encode()
    width = max(len(encoded.dictionary), 1)
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    sets = []
    for lists, mine in ((x, codes[: len(flat[0])]), (y, codes[len(flat[0]) :])):
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(rows), lengths)
        # A row and a value as one number: below rows * distinct values, far from 2**63.
        sets.append(np.unique((row * width + mine)[mine >= 0]))
    common = np.intersect1d(sets[0], sets[1], assume_unique=True)
    a, b, both = (np.bincount(s // width, minlength=rows).astype(np.int64) for s in (*sets, common))
    return a, b, both
