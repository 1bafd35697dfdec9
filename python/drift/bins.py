"""Bins that a column's values are counted in: fixed by the training range, the same for every later day.

A number's bins are cut at quantiles, a category's are its most frequent values and all the rest. They are chosen from
a sample of the training rows, and then *all* rows are counted in them: a sample's deciles are not quite the deciles,
but the counts on both sides of a comparison are exact.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

Value = str | int | bool


@dataclass(frozen=True)
class NumberBins:
    """Bin i holds edges[i-1] <= x < edges[i]; the first and the last are open. NaN belongs to none."""

    edges: tuple[float, ...]
    #: Subtracted before sums are taken: sums of squares of large numbers with small differences would cancel.
    centre: float = 0.0

    @property
    def size(self) -> int:
        """Number of bins."""
        return len(self.edges) + 1

    def index(self, x: F64) -> I64:
        """The bin of each number. float64 [n] -> int64 [n]."""
        return np.searchsorted(np.asarray(self.edges, np.float64), x, side="right")

    @staticmethod
    def of(sample: F64, count: int) -> NumberBins:
        """Cuts at the `count`-quantiles of a sample, at its ends, and around values that hold a quantile alone.

        What lies below the smallest or above the largest number of the sample gets a bin of its own, so a day that
        leaves the training range is seen; so does a value that is a `count`-th of all rows or more (zero, often).

        Args:
            sample: float64 [n]; NaN and infinities are left out.
            count: quantiles, at least 2.
        """
        x = np.sort(sample[np.isfinite(sample)])
        if not len(x):
            return NumberBins(())
        cuts = x[[len(x) * i // count for i in range(1, count)]]
        heavy = np.unique(cuts[1:][cuts[1:] == cuts[:-1]])
        with np.errstate(over="ignore"):
            above = np.nextafter(np.append(heavy, x[-1]), np.inf)
        edges = np.unique(np.concatenate([x[:1], cuts, above]))
        # Adding 0.0 makes -0.0 the 0.0 that it equals.
        return NumberBins(tuple(float(e) + 0.0 for e in edges if np.isfinite(e)), float(x[len(x) // 2]))


@dataclass(frozen=True)
class ValueBins:
    """A bin for each of `values`, in order, and a last one for all others."""

    values: tuple[Value, ...]

    @property
    def size(self) -> int:
        """Number of bins."""
        return len(self.values) + 1

    def index(self, x: pa.Array) -> I64:
        """The bin of each value of a text, integer or boolean array without nulls. [n] -> int64 [n]."""
        known = pa.array(self.values, x.type)
        if pa.types.is_string(x.type):
            # Each distinct text is looked up once.
            coded = x.dictionary_encode()
            found = pc.fill_null(pc.index_in(coded.dictionary, known), len(self.values))
            found = found.take(coded.indices)
        else:
            found = pc.fill_null(pc.index_in(x, known), len(self.values))
        index: I64 = found.to_numpy(zero_copy_only=False).astype(np.int64)
        return index

    @staticmethod
    def of(sample: pa.Array, count: int, first: tuple[Value, ...] = ()) -> ValueBins:
        """The `count` most frequent values of a sample; of equally frequent ones the smaller.

        Args:
            sample: text, integers or booleans [n], no nulls.
            count: at most this many values.
            first: values that get a bin in any case, before the others.
        """
        if not len(sample):
            return ValueBins(first)
        counted = sample.value_counts()
        pairs = zip(counted.field("counts").to_pylist(), counted.field("values").to_pylist(), strict=True)
        top = heapq.nsmallest(count + len(first), pairs, key=lambda pair: (-pair[0], pair[1]))
        return ValueBins((*first, *itertools.islice((v for _, v in top if v not in first), count)))


Bins = NumberBins | ValueBins


def describe(bins: Bins, counts: I64, names: Mapping[Value, str] | None = None) -> list[dict[str, object]]:
    """Bins and their counts as records (low, high, value, count, share); low and high null: open, value null: the rest.

    Args:
        bins: of the column.
        counts: int64 [bins.size].
        names: of values, where they are codes.
    """
    total = int(counts.sum())
    found: list[dict[str, object]] = []
    for i, count in enumerate(counts.tolist()):
        low = high = value = None
        if isinstance(bins, NumberBins):
            low = bins.edges[i - 1] if i > 0 else None
            high = bins.edges[i] if i < len(bins.edges) else None
        elif i < len(bins.values):
            raw = bins.values[i]
            value = (names or {}).get(raw, str(raw).lower() if isinstance(raw, bool) else str(raw))
        share = count / total if total else None
        found.append({"low": low, "high": high, "value": value, "count": count, "share": share})
    return found
