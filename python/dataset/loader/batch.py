"""What the reader hands to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.jagged import JaggedArray


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a step. The columns of `continuous` and `codes` are the schema's features, in its order.

    continuous: float32 [B, C], a list has `length` columns, 0 behind its end; codes: int64 [B, S], of the S categorical
    features of one value a row; labels: float32 [B]; carried: asked-for carried columns, each [B]; lists: of the
    categorical features of lists, by name, in the schema's order: codes int32 or raw ids int64, without padding, with
    int64 offsets from 0. B may be 0 in an evaluation pass. negatives: ids that are drawn for each row, int64 [B, n], or
    for all of the step's rows, [n] (headrace.dataset.loader.candidates).

    The matrices lie column by column in memory, as the file does. Memory is used again when nothing refers to it.
    """

    continuous: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    carried: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    lists: Mapping[str, JaggedArray] = field(default_factory=dict)
    negatives: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        return int(self.labels.shape[0])
