"""Which rows of joined tables the vectors of users, or of items, look up."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.score.joined.needed import SeenCodes
from headrace.score.vectors.model_vectors import ModelVectors


class CodesOfVectors:
    """The codes, or raw ids, that vectors of some rows look up, and those of rows of which nothing is known.

    Args:
        vectors: the model and the side.
    """

    def __init__(self, vectors: ModelVectors) -> None:
        self._vectors, self._codes = vectors, SeenCodes(vectors)
        for columns in vectors.features_of_nothing():
            self._codes.add(columns)

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at rows that have the side's columns, and perhaps others."""
        for columns in self._vectors.features_of(batch):
            self._codes.add(columns)

    def found(self) -> dict[str, NDArray[np.int64]]:
        """By table: int64, ascending."""
        return self._codes.found()
