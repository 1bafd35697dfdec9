"""Lists of numbers as offsets and values, in NumPy: what batches and scored pairs have of a list feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class JaggedArray:
    """Lists of some rows: list i is values[offsets[i]:offsets[i + 1]]."""

    #: int32 or int64 [rows + 1], ascending; need not begin at 0.
    offsets: Array
    #: [N], of any type of numbers.
    values: Array

    @staticmethod
    def of_padded(padded: Array) -> JaggedArray:
        """From a matrix [rows, length], without its zeros."""
        kept = padded != 0
        offsets = np.zeros(len(padded) + 1, np.int64)
        np.cumsum(kept.sum(axis=1), out=offsets[1:])
        return JaggedArray(offsets, padded[kept])

    def __len__(self) -> int:
        """Rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """Values of each row: [rows]."""
        return np.diff(self.offsets)

    def rows(self, start: int, end: int) -> JaggedArray:
        """Consecutive rows: views."""
        return JaggedArray(self.offsets[start : end + 1], self.values)

    def flat(self) -> Array:
        """The values of all rows, one list behind the other: a view."""
        return self.values[int(self.offsets[0]) : int(self.offsets[-1])]

    def to_padded(self, length: int) -> Array:
        """[rows, length], 0 behind each list's end. No list is longer."""
        out = np.zeros((len(self), length), self.values.dtype, order="F")
        lengths, first = self.lengths, int(self.offsets[0])
        place = np.arange(int(self.offsets[-1]) - first) - np.repeat(self.offsets[:-1] - first, lengths)
        out[np.repeat(np.arange(len(self)), lengths), place] = self.flat()
        return out


def concatenated(parts: Sequence[JaggedArray], dtype: npt.DTypeLike) -> JaggedArray:
    """The rows of several, one behind the other, in memory of its own: int64 offsets from 0, values of a type."""
    offsets = np.zeros(1 + sum(map(len, parts)), np.int64)
    if parts:
        np.cumsum(np.concatenate([p.lengths for p in parts]), out=offsets[1:])
    values = [p.flat() for p in parts] or [np.empty(0)]
    return JaggedArray(offsets, np.concatenate(values, dtype=dtype, casting="unsafe"))
