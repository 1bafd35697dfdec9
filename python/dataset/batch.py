"""What the reader hands to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a step. The columns of `continuous` and `codes` are the schema's, in its order.

    continuous: float32 [B, C]; codes: int64 [B, S], S physical categorical columns; labels: float32 [B];
    carried: asked-for carried columns, each [B]. B may be 0 in an evaluation pass.
    """

    continuous: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    carried: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.labels.shape[0])


def concat(parts: Sequence[Batch]) -> Batch:
    """One batch of all rows, in order. Parts without rows do not count, so their column types do not either."""
    parts = [p for p in parts if p.rows] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    return Batch(
        np.concatenate([p.continuous for p in parts]),
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.labels for p in parts]),
        {name: np.concatenate([p.carried[name] for p in parts]) for name in parts[0].carried},
    )
