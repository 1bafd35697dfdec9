"""The section `second_stage`: XGBoost over what the neural model says."""

from __future__ import annotations

from headrace.config.baseline import Trees


class SecondStage(Trees):
    """XGBoost on Spark over the dataset's features and the neural model's predictions (stacking: Wolpert, 1992).

    It learns from the split `valid`, of which the neural model has learned nothing, and is evaluated on the split
    `test` (`features.split.test_days`).
    """
