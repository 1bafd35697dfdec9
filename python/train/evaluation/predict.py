"""Evaluation over all ranks: each predicts its streams, then all predictions meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.dataset.loader.loaders import EvalLoader
from headrace.dataset.parquet.layout import SplitLayout
from headrace.schema import DatasetSchema
from headrace.train.evaluation.metrics import calibration_bins, click_metrics, ranking_metrics, sigmoid

#: (continuous [B, C], codes [B, S]) -> logits [B].
Model = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Predictions:
    """Predictions of a whole split, on every rank: logits float32 [N], labels float32 [N], groups int64 [N] or None."""

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int64] | None = None

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        return sigmoid(self.logits)


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a model by name, and the calibration plot's points."""

    rows: int
    metrics: dict[str, float | None]
    calibration_bins: list[dict[str, Any]] = field(default_factory=list)


def predict_split(
    model: Model,
    layout: SplitLayout,
    schema: DatasetSchema,
    collective: Collective,
    *,
    batch_size: int,
    streams: int,
    group: str | None = None,
) -> Predictions:
    """Predict every row of a split once. Collective: every rank calls it.

    Args:
        group: a carried column to bring along; text becomes a 64-bit hash.
    """
    logits, labels, groups = [], [], []
    carried = [group] if group else []
    with EvalLoader(
        layout, schema, collective.world, batch_size=batch_size, streams=streams, carried=carried
    ) as source:
        with torch.no_grad():  # not inference_mode: its tensors cannot be sent by Horovod's thread
            for batch in source:
                logits.append(model(torch.from_numpy(batch.continuous), torch.from_numpy(batch.codes)).float().cpu())
                labels.append(torch.from_numpy(batch.labels))
                if group:
                    groups.append(torch.from_numpy(_group_ids(batch.carried[group])))
    gathered = [collective.all_gather(torch.cat(parts)).numpy() for parts in (logits, labels)]
    ids = collective.all_gather(torch.cat(groups)).numpy() if group else None
    return Predictions(gathered[0], gathered[1], ids)


def evaluate_clicks(predictions: Predictions) -> Evaluation:
    """AUC, log loss, calibration."""
    probabilities = predictions.probabilities
    bins = calibration_bins(predictions.labels, probabilities)
    return Evaluation(
        len(predictions.labels), click_metrics(predictions.labels, probabilities), [asdict(b) for b in bins]
    )


def evaluate_ranking(predictions: Predictions, k: int) -> dict[str, float]:
    """hr_at_k and ndcg_at_k by group."""
    assert predictions.groups is not None
    return ranking_metrics(predictions.groups, predictions.labels, predictions.logits, k)


def _group_ids(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    if not len(values):
        return np.empty(0, np.int64)
    return pd.util.hash_array(values.astype(object), categorize=False).view(np.int64)
