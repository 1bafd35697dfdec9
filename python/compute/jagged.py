"""Jagged arrays of NumPy: list features of batches and scored pairs, as offsets and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class JaggedArray:
    """One list of numbers a row: list i is values[offsets[i]:offsets[i + 1]]."""

    #: int32 or int64 [rows + 1], ascending; need not begin at 0.
    offsets: Array
    #: [N], of any type of numbers.
    values: Array

    @staticmethod
    def of_padded(padded: Array) -> JaggedArray:
        """Convert a matrix [rows, length]; its zeros are padding and are dropped."""
        is_value = padded != 0
        offsets = np.zeros(len(padded) + 1, np.int64)
        np.cumsum(is_value.sum(axis=1), out=offsets[1:])
        return JaggedArray(offsets, padded[is_value])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """Number of values in each row: [rows]."""
        return np.diff(self.offsets)

    def rows(self, start: int, end: int) -> JaggedArray:
        """Return the rows from `start` to before `end`, as views."""
        return JaggedArray(self.offsets[start : end + 1], self.values)

    def flat(self) -> Array:
        """Return the values of all rows, list after list: a view."""
        return self.values[int(self.offsets[0]) : int(self.offsets[-1])]

    def to_padded(self, length: int) -> Array:
        """Return a matrix [rows, length] with 0 after each list's end. No list may be longer than `length`."""
        out = np.zeros((len(self), length), self.values.dtype, order="F")
        lengths, first = self.lengths, int(self.offsets[0])
        column = np.arange(int(self.offsets[-1]) - first) - np.repeat(self.offsets[:-1] - first, lengths)
        out[np.repeat(np.arange(len(self)), lengths), column] = self.flat()
        return out


def concatenated(parts: Sequence[JaggedArray], dtype: npt.DTypeLike) -> JaggedArray:
    """Concatenate the rows of several arrays into new memory: int64 offsets from 0, values of `dtype`."""
    offsets = np.zeros(1 + sum(map(len, parts)), np.int64)
    if parts:
        np.cumsum(np.concatenate([p.lengths for p in parts]), out=offsets[1:])
    values = [p.flat() for p in parts] or [np.empty(0)]
    return JaggedArray(offsets, np.concatenate(values, dtype=dtype, casting="unsafe"))
