"""What the reader hands to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a step. The columns of `continuous` and `codes` are the schema's, in its order.

    continuous: float32 [B, C]; codes: int64 [B, S], S physical categorical columns; labels: float32 [B];
    carried: asked-for carried columns, each [B]. B may be 0 in an evaluation pass.

    The matrices lie column by column in memory, as the file does. Memory is used again when nothing refers to it.
    """

    continuous: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    carried: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.labels.shape[0])
