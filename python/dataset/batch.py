"""What the reader hands to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a step. The columns of `continuous` and `codes` are the schema's, in its order.

    continuous: float32 [B, C]; codes: int64 [B, S], S physical categorical columns; labels: float32 [B];
    carried: asked-for carried columns, each [B]. B may be 0 in an evaluation pass.

    The matrices lie column by column in memory, as the file does: cutting and joining rows is a copy a column.
    (Inside the reader, codes keep the width that they are stored in.)
    """

    continuous: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    carried: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.labels.shape[0])

    def part(self, rows: slice) -> Batch:
        """Some consecutive rows: views."""
        carried = {k: v[rows] for k, v in self.carried.items()}
        return Batch(self.continuous[rows], self.codes[rows], self.labels[rows], carried)

    def rows_at(self, places: npt.NDArray[np.int64]) -> Batch:
        """The rows at some places, which may repeat: copies."""
        carried = {k: v[places] for k, v in self.carried.items()}
        return Batch(_take(self.continuous, places), _take(self.codes, places), self.labels[places], carried)


def concat(parts: Sequence[Batch]) -> Batch:
    """One batch of all rows, in order: copies. Parts without rows do not count, so their column types do not either."""
    parts = [p for p in parts if p.rows] or parts[:1]
    return Batch(
        _join([p.continuous for p in parts], np.float32),
        _join([p.codes for p in parts], np.int64),
        np.concatenate([p.labels for p in parts]),
        {name: np.concatenate([p.carried[name] for p in parts]) for name in parts[0].carried},
    )


def _take(x: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """x[rows], column by column."""
    # No place is out of range; "clip" is the mode without a buffer.
    found: npt.NDArray[Any] = np.take(x.T, rows, axis=1, mode="clip")
    return found.T


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    """Rows of all parts, column by column, as `dtype`."""
    found: npt.NDArray[Any] = np.empty((parts[0].shape[1], sum(len(p) for p in parts)), dtype)
    np.concatenate([p.T for p in parts], axis=1, out=found)
    return found.T
