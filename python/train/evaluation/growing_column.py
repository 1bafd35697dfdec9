"""A column that batches are added to, in one piece of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_ROWS = 1 << 16


class GrowingColumn:
    """Rows of one column, batch after batch.

    Not a list of the batches' arrays: each would be a few kilobytes that stay between the megabytes which the model
    takes and gives back for every batch, so that none of those could be used again. 600 bytes a row were lost so.

    Args:
        kind: of the values, before any are known.
    """

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._kind = np.dtype(kind)
        self._values: npt.NDArray[Any] | None = None
        self._rows = 0

    def add(self, values: npt.NDArray[Any]) -> None:
        """Add rows [n]. A type that the rows so far do not fit, or that does not hold them, widens the column."""
        end = self._rows + len(values)
        if self._values is None:
            self._values = np.empty(max(_FIRST_ROWS, end), values.dtype)
        kind = np.promote_types(self._values.dtype, values.dtype)
        if end > len(self._values) or kind != self._values.dtype:
            larger = np.empty(max(2 * len(self._values), end) if end > len(self._values) else len(self._values), kind)
            larger[: self._rows] = self._values[: self._rows]
            self._values = larger
        self._values[self._rows : end] = values
        self._rows = end

    @property
    def array(self) -> npt.NDArray[Any]:
        """The rows so far, [n]: a view."""
        return np.empty(0, self._kind) if self._values is None else self._values[: self._rows]
