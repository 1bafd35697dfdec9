"""What the reader hands to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.buffers import Buffers


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


def concat(parts: Sequence[Batch], buffers: Buffers) -> Batch:
    """One batch of all rows, in order: copies. Parts without rows do not count, so their column types do not either."""
    parts = [p for p in parts if p.rows] or parts[:1]
    labels = buffers.empty((sum(p.rows for p in parts),), np.float32)
    return Batch(
        _join([p.continuous for p in parts], np.float32, buffers),
        _join([p.codes for p in parts], np.int64, buffers),
        np.concatenate([p.labels for p in parts], out=labels),
        {name: np.concatenate([p.carried[name] for p in parts]) for name in parts[0].carried},
    )


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type, buffers: Buffers) -> npt.NDArray[Any]:
    """Rows of all parts, column by column, as `dtype`."""
    found = buffers.empty((parts[0].shape[1], sum(len(p) for p in parts)), dtype)
    np.concatenate([p.T for p in parts], axis=1, out=found)
    return found.T
