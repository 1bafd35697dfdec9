"""Second stage: XGBoost over another model's predictions, saved with a reference to that model.

The folder is one of XGBoost's saved models. Its `model.json` also names the first model by version (`first`). The first
model stays in the folder of its own run, beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from headrace.compute.jagged import FeatureColumns
from headrace.config.schema import DatasetSchema
from headrace.models.xgboost_model import load_booster, matrix
from headrace.storage import Location

KIND = "second_stage"
Predictions = Mapping[str, NDArray[np.float32]]


class FirstModel(Protocol):
    """The first model, loaded (`headrace.models.predictor.Predictor`)."""

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Predict each label of the model, by the task's name: float32 [n]."""
        ...


def stacked_matrix(
    schema: DatasetSchema, columns: FeatureColumns, predictions: Predictions, outputs: Sequence[str]
) -> NDArray[np.float32]:
    """Return the trees' input, float32 [n, F]: `xgboost_model.matrix`, then a column for each of `outputs`."""
    # The output of a model in retrieval form is a dot product, no probability: trees use only the order of values.
    return np.column_stack([matrix(schema, columns), *(predictions[name] for name in outputs)]).astype(
        np.float32, copy=False
    )


@dataclass(frozen=True)
class SecondStagePredictor:
    """Predictor of trees over the features and the first model's predictions."""

    schema: DatasetSchema
    booster: xgb.Booster
    first: FirstModel
    outputs: tuple[str, ...]
    kind: str = KIND

    def predict(self, columns: FeatureColumns) -> NDArray[np.float32]:
        """Predict float32 [n] from features by name. The first model predicts the same rows."""
        return self.predict_from(columns, self.first.predict_tasks(columns))

    def predict_from(self, columns: FeatureColumns, predictions: Predictions) -> NDArray[np.float32]:
        """Predict float32 [n] from features by name and predictions of the first model.

        Args:
            columns: features by name.
            predictions: result of the first model's `predict_tasks` for these rows.
        """
        data = stacked_matrix(self.schema, columns, predictions, self.outputs)
        if not len(data):
            return np.empty(0, dtype=np.float32)
        return np.asarray(self.booster.inplace_predict(data, validate_features=False), dtype=np.float32)

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Return the predictions of the only task, `label`: float32 [n]."""
        return {"label": self.predict(columns)}


def load(
    folder: Location, schema: DatasetSchema, meta: Mapping[str, Any], first: FirstModel, threads: int | None = None
) -> SecondStagePredictor:
    """Read the trees of a saved model.

    Args:
        folder: the saved model.
        schema: from its model.json.
        meta: its model.json.
        first: the model that it names.
        threads: number of XGBoost's threads; None: all cores.

    Raises:
        UserError: the file of the trees is damaged, or they were trained on another number of columns.
    """
    outputs = tuple(meta["first"]["outputs"])
    booster = load_booster(folder, schema, meta.get("files", ()), threads, len(outputs))
    return SecondStagePredictor(schema, booster, first, outputs)
