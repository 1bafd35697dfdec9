"""Features of rows by name: arrays, and lists as jagged arrays of offsets and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from headrace.config.schema import Feature

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


#: A feature of one value a row by its name, [n]; a list by its name as a JaggedArray, or padded with 0 as its physical
#: columns `name__0 ...`, [n] each.
FeatureColumns = Mapping[str, NDArray[Any] | JaggedArray]


def row_count(columns: FeatureColumns) -> int:
    """Return the number of rows, n; 0 without columns."""
    return next((len(column) for column in columns.values()), 0)


def jagged_of(columns: FeatureColumns, feature: Feature) -> JaggedArray:
    """Return a list feature's values. Raises KeyError if it is missing."""
    column = columns.get(feature.name)
    if isinstance(column, JaggedArray):
        return column
    return JaggedArray.of_padded(_side_by_side(columns, feature))


def matrix_of(columns: FeatureColumns, feature: Feature) -> NDArray[Any]:
    """Return a feature as [n, length], a list padded with 0. Raises KeyError if it is missing."""
    column = columns.get(feature.name)
    if isinstance(column, JaggedArray):
        return column.to_padded(feature.length)
    return _side_by_side(columns, feature)


def _side_by_side(columns: FeatureColumns, feature: Feature) -> NDArray[Any]:
    return np.stack([np.asarray(columns[name]) for name in feature.physical], axis=1)
