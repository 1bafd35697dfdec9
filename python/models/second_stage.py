"""Second stage: XGBoost over another model's predictions, as a saved model that names the first one.

Its folder is that of XGBoost's saved models; `model.json` also names the first model by version (`first`), which lies
in the folder of its own run, beside this one's.
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
    """A loaded model (`headrace.models.predictor.Predictor`)."""

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Predict each label of the model, by the task's name: float32 [n]."""
        ...


def stacked_matrix(
    schema: DatasetSchema, columns: FeatureColumns, predictions: Predictions, outputs: Sequence[str]
) -> NDArray[np.float32]:
    """Return the input of the trees: `xgboost_model.matrix`, and a column for each output of the first model.

    float32 [n, F].
    """
    # A model in retrieval form gives its dot product: trees use the order of values alone.
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
        return self.predict_after(columns, self.first.predict_tasks(columns))

    def predict_after(self, columns: FeatureColumns, predictions: Predictions) -> NDArray[np.float32]:
        """Predict float32 [n] from features by name and predictions of the first model.

        Args:
            columns: features by name.
            predictions: what `predict_tasks` of the first model gave for these rows.
        """
        data = stacked_matrix(self.schema, columns, predictions, self.outputs)
        if not len(data):
            return np.empty(0, dtype=np.float32)
        return np.asarray(self.booster.inplace_predict(data, validate_features=False), dtype=np.float32)

    def predict_tasks(self, columns: FeatureColumns) -> dict[str, NDArray[np.float32]]:
        """Return predictions of the one label, `label`: float32 [n]."""
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
        threads: of XGBoost; None: all cores.

    Raises:
        UserError: the file is damaged, or was trained on another number of columns.
    """
    outputs = tuple(meta["first"]["outputs"])
    booster = load_booster(folder, schema, meta.get("files", ()), threads, len(outputs))
    return SecondStagePredictor(schema, booster, first, outputs)
