"""Saved models for `mlflow.pyfunc.load_model`: MLflow imports this module by its name, and calls `_load_pyfunc`.

    model = mlflow.pyfunc.load_model("models:/clicks@champion")
    model.predict(frame)  # float32 [rows]

It needs the packages that the model's requirements.txt names: headrace comes with the model. No checkout, workspace or
Spark.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.library.predictor import Predictor


class SavedModel:
    """Saved model as MLflow calls it for predictions."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def predict(self, model_input: Any) -> NDArray[np.float32]:
        """Probabilities or numbers, float32 [rows]; of several tasks the first.

        Args:
            model_input: a pandas frame with the columns of the model's features, as the lake has them.

        Raises:
            UserError: the model is damaged, or the frame lacks a column or has it in another type.
        """
        predictions: NDArray[np.float32] = Predictor(self._folder).predict(model_input)
        return predictions


def _load_pyfunc(path: str) -> SavedModel:
    return SavedModel(path)
