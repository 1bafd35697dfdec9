"""What is counted of a column in some rows; merges with what was counted of other rows.

- counts by bin (headrace.drift.bins), missing rows, smallest and largest finite value: exact;
- mean and standard deviation from sums about the training median (shifted data: Chan, Golub and LeVeque, "Algorithms
  for computing the sample variance", 1983), added in the order of the parts. Not the digits of
  features.learn.exact_sums: those leave out what float32 cannot hold, and a report, which needs no last bit, counts it;
- the number of distinct values: exact up to 2,048, above it from the 2,048 smallest 64-bit hashes (k minimum values:
  Bar-Yossef et al., "Counting distinct elements in a data stream", 2002), with a standard error of 2.2 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.drift.bins import I64, Bins, NumberBins
from headrace.udfs.xxhash64 import xxhash64_integers, xxhash64_strings

U64 = npt.NDArray[np.uint64]

#: Smallest hashes that are kept of a column: below this many, the number of distinct values is exact.
_SMALLEST = 2048


@dataclass
class ColumnStatistics:
    """Of one column in the rows of one split."""

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
    #: Distinct values where somebody else has counted them.
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

    def merge(self, other: ColumnStatistics) -> None:
        """Add what was counted of other rows in the same bins."""
        self.rows += other.rows
        self.missing += other.missing
        self.counts = self.counts + other.counts
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.finite += other.finite
        self.sum += other.sum
        self.squares += other.squares
        self._keep(other.smallest)

    @property
    def values(self) -> int:
        """Values counted: of a list, its elements."""
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
        """Of the finite numbers."""
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
        """As JSON; `unpacked` is its inverse."""
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
    def unpacked(bins: Bins, found: Mapping[str, Any]) -> ColumnStatistics:
        """What `packed` made of a tally with these bins."""
        arrays = {"counts": np.array(found["counts"], np.int64), "smallest": np.array(found["smallest"], np.uint64)}
        return ColumnStatistics(bins, **{**found, **arrays})

    def _count(self, index: I64, times: I64 | None) -> None:
        # As floating weights, counts are exact up to 2**53.
        self.counts += np.bincount(index, times, minlength=self.bins.size).astype(np.int64)

    def _add_up(self, x: npt.NDArray[np.float64], times: I64 | None) -> None:
        assert isinstance(self.bins, NumberBins)
        there = np.isfinite(x)
        finite, often = x[there], None if times is None else times[there]
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
