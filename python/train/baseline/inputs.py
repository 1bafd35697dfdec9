"""The matrix that trees learn from: the dataset's features, and perhaps another model's predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from headrace.models.columns import FeatureColumns
from headrace.models.predictor import Predictor, load_predictor
from headrace.models.second_stage import SecondStagePredictor, stacked_matrix
from headrace.models.xgboost_model import XGBoostPredictor, matrix, matrix_columns, matrix_features
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.storage import Location


@dataclass(frozen=True)
class TreeInputs:
    """What tasks are told of the matrix; small.

    first: the saved model whose predictions are columns, too, visible on every executor; outputs: which.
    """

    schema: DatasetSchema
    first: Location | None = None
    outputs: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Columns of the matrix."""
        return len(matrix_columns(self.schema)) + len(self.outputs)

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features that are read; the first model looks at raw ids, too."""
        if self.first is None:
            return matrix_features(self.schema)
        return (*self.schema.of(Kind.CONTINUOUS), *self.schema.of(Kind.CATEGORICAL))

    def matrix(self, columns: FeatureColumns) -> NDArray[np.float32]:
        """The matrix of features by name: float32 [n, width]."""
        if self.first is None:
            return matrix(self.schema, columns)
        return stacked_matrix(self.schema, columns, _loaded(self.first).predict_tasks(columns), self.outputs)

    def predictor(self, booster: xgb.Booster) -> Predictor:
        """What trees over such a matrix say."""
        if self.first is None:
            return XGBoostPredictor(self.schema, booster)
        return SecondStagePredictor(self.schema, booster, _loaded(self.first), self.outputs)


@lru_cache(maxsize=1)
def _loaded(folder: Location) -> Predictor:
    """Once in each Python worker; a model's folder never changes."""
    return load_predictor(folder, threads=1)
