"""Statistics of one column in some rows; those of other rows merge into them.

Values are counted in bins that the training range fixes, the same for every later day. A number's bins are cut at
quantiles; a category's are its most frequent values and all the rest. They are chosen from a sample of the training
rows, and then *all* rows are counted in them: a sample's deciles are not quite the deciles, but the counts on both
sides of a comparison are exact.

- counts by bin, missing rows, smallest and largest finite value: exact;
- mean and standard deviation from sums about the training median (shifted data: Chan, Golub and LeVeque, "Algorithms
  for computing the sample variance", 1983), added in the order of the parts. Not the digits of
  features.learn.exact_sums: those leave out what float32 cannot hold, and a report, which needs no last bit, counts it;
- the number of distinct values: exact up to 2,048, above it from the 2,048 smallest 64-bit hashes (k minimum values:
  Bar-Yossef et al., "Counting distinct elements in a data stream", 2002), with a standard error of 2.2 %.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.compute import pc
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

Value = str | int | bool


U64 = npt.NDArray[np.uint64]
#: Number of smallest hashes to keep of a column: with fewer distinct values, their number is exact.
_SMALLEST = 2048


@dataclass(frozen=True)
class NumberBins:
    """Bins of a number: bin i holds edges[i-1] <= x < edges[i], the first and the last are open. NaN is in none."""

    edges: tuple[float, ...]
    #: Subtracted before sums are taken: sums of squares of large numbers with small differences would cancel.
    centre: float = 0.0

    @property
    def size(self) -> int:
        """Return number of bins."""
        return len(self.edges) + 1

    def index(self, x: F64) -> I64:
        """Return the bin of each number. float64 [n] -> int64 [n]."""
        return np.searchsorted(np.asarray(self.edges, np.float64), x, side="right")

    @staticmethod
    def from_sample(sample: F64, count: int) -> NumberBins:
        """Cut at the `count`-quantiles of a sample, at its ends, and around values that fill a quantile alone.

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
        # Adding 0.0 turns -0.0 into 0.0, which sorts into the same bin.
        return NumberBins(tuple(float(e) + 0.0 for e in edges if np.isfinite(e)), float(x[len(x) // 2]))


@dataclass(frozen=True)
class ValueBins:
    """Bins of a category: one for each of `values`, in order, and a last one for all others."""

    values: tuple[Value, ...]

    @property
    def size(self) -> int:
        """Return number of bins."""
        return len(self.values) + 1

    def index(self, x: pa.Array) -> I64:
        """Return the bin of each value of a text, integer or boolean array without nulls. [n] -> int64 [n]."""
        known = pa.array(self.values, x.type)
        if pa.types.is_string(x.type):
            # Each distinct text is looked up once.
            coded = x.dictionary_encode()
            bin_numbers = pc.fill_null(pc.index_in(coded.dictionary, known), len(self.values))
            bin_numbers = bin_numbers.take(coded.indices)
        else:
            bin_numbers = pc.fill_null(pc.index_in(x, known), len(self.values))
        index: I64 = bin_numbers.to_numpy(zero_copy_only=False).astype(np.int64)
        return index

    @staticmethod
    def from_sample(sample: pa.Array, count: int, first: tuple[Value, ...] = ()) -> ValueBins:
        """Return the `count` most frequent values of a sample; of equally frequent ones the smaller.

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
    records: list[dict[str, object]] = []
    for i, count in enumerate(counts.tolist()):
        low = high = value = None
        if isinstance(bins, NumberBins):
            low = bins.edges[i - 1] if i > 0 else None
            high = bins.edges[i] if i < len(bins.edges) else None
        elif i < len(bins.values):
            raw = bins.values[i]
            value = (names or {}).get(raw, str(raw).lower() if isinstance(raw, bool) else str(raw))
        share = count / total if total else None
        records.append({"low": low, "high": high, "value": value, "count": count, "share": share})
    return records


@dataclass
class ColumnStatistics:
    """Statistics of one column in the rows of one split."""

    bins: Bins
    rows: int = 0
    missing: int = 0
    counts: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    low: float = math.inf
    high: float = -math.inf
    #: Finite values; the sums are about the bins' centre.
    finite: int = 0
    sum: float = 0.0
    squares: float = 0.0
    smallest: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    #: Number of distinct values, where it was counted separately.
    estimate: int | None = None

    def __post_init__(self) -> None:
        if not len(self.counts):
            self.counts = np.zeros(self.bins.size, np.int64)

    def add(self, values: pa.Array, missing: int, rows: int, times: I64 | None = None) -> None:
        """Count the values of `rows` rows.

        Args:
            values: text, integers, booleans or numbers [n], no null and no NaN.
            missing: rows without a value.
            rows: all of them.
            times: how often each value is there, int64 [n], none 0; None: once.
        """
        self.rows += rows
        self.missing += missing
        if not len(values):
            return
        if isinstance(self.bins, NumberBins):
            x = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            self._count(self.bins.index(x), times)
            self._add_up(x, times)
            hashes = xxhash64_integers((x + 0.0).view(np.int64))
        else:
            self._count(self.bins.index(values), times)
            if pa.types.is_string(values.type):
                distinct = values if times is not None else values.dictionary_encode().dictionary
                hashes = xxhash64_strings(distinct)
            else:
                hashes = xxhash64_integers(values.cast(pa.int64()).to_numpy(zero_copy_only=False))
        self._keep(hashes.view(np.uint64))

    def merge(self, more: ColumnStatistics) -> None:
        """Add the counts of other rows in the same bins."""
        self.rows += more.rows
        self.missing += more.missing
        self.counts = self.counts + more.counts
        self.low, self.high = min(self.low, more.low), max(self.high, more.high)
        self.finite += more.finite
        self.sum += more.sum
        self.squares += more.squares
        self._keep(more.smallest)

    @property
    def values(self) -> int:
        """Return values counted: of a list, its elements."""
        return int(self.counts.sum())

    @property
    def distinct(self) -> int:
        """Distinct values: exact below 2,048, else estimated."""
        if self.estimate is not None:
            return self.estimate
        if len(self.smallest) < _SMALLEST:
            return len(self.smallest)
        return round((_SMALLEST - 1) / (float(self.smallest[-1]) / 2.0**64))

    @property
    def mean(self) -> float | None:
        """Return the mean of the finite numbers."""
        if not self.finite or not isinstance(self.bins, NumberBins):
            return None
        return _finite(self.bins.centre + self.sum / self.finite)

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the finite numbers; None of fewer than two."""
        if self.finite < 2:
            return None
        return _finite(math.sqrt(max(self.squares - self.sum * self.sum / self.finite, 0.0) / (self.finite - 1)))

    def packed(self) -> dict[str, Any]:
        """Return JSON values; `unpacked` is the inverse."""
        return {
            "rows": self.rows,
            "missing": self.missing,
            "counts": self.counts.tolist(),
            "low": self.low,
            "high": self.high,
            "finite": self.finite,
            "sum": self.sum,
            "squares": self.squares,
            "smallest": self.smallest.tolist(),
        }

    @staticmethod
    def unpacked(bins: Bins, record: Mapping[str, Any]) -> ColumnStatistics:
        """Rebuild statistics with these bins from what `packed` returned."""
        arrays = {"counts": np.array(record["counts"], np.int64), "smallest": np.array(record["smallest"], np.uint64)}
        return ColumnStatistics(bins, **{**record, **arrays})

    def _count(self, index: I64, times: I64 | None) -> None:
        # As floating weights, counts are exact up to 2**53.
        self.counts += np.bincount(index, times, minlength=self.bins.size).astype(np.int64)

    def _add_up(self, x: npt.NDArray[np.float64], times: I64 | None) -> None:
        assert isinstance(self.bins, NumberBins)
        is_finite = np.isfinite(x)
        finite, often = x[is_finite], None if times is None else times[is_finite]
        if not len(finite):
            return
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            centred = finite - self.bins.centre
            squares = np.square(centred)
            if often is not None:
                centred, squares = centred * often, squares * often
            self.finite += len(finite) if often is None else int(often.sum())
            self.sum += float(centred.sum())
            self.squares += float(squares.sum())

    def _keep(self, hashes: U64) -> None:
        if len(self.smallest) == _SMALLEST:
            hashes = hashes[hashes < self.smallest[-1]]
        if len(hashes):
            self.smallest = np.unique(np.concatenate([self.smallest, hashes]))[:_SMALLEST]


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
