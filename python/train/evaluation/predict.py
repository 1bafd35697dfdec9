"""Predictions of a split: each rank predicts the streams that it owns, and keeps what it predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.dataset.loader.loaders import EvalLoader
from headrace.dataset.parquet.layout import SplitLayout
from headrace.models.categorical import CategoricalBatch
from headrace.schema import DatasetSchema, Kind
from headrace.train.evaluation.predictions import Predictions
from headrace.train.evaluation.rows import F32
from headrace.train.micro_batch import MicroBatch

#: (continuous [B, C], categorical features) -> logits [B].
Model = Callable[[Tensor, CategoricalBatch], Tensor]


def predict_split(
    model: Model,
    layout: SplitLayout,
    schema: DatasetSchema,
    collective: Collective,
    *,
    batch_size: int,
    streams: int,
    carried: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> Predictions:
    """Predict every row of a split once, over all ranks. Collective: every rank calls it.

    Args:
        carried: carried columns to bring along.
        codes: categorical features of one code a row, to bring along.
    """
    scalars = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    places = {name: scalars.index(name) for name in codes}
    logits: list[F32] = []
    labels: list[F32] = []
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*carried, *codes)}
    with EvalLoader(
        layout, schema, collective.world, batch_size=batch_size, streams=streams, carried=carried
    ) as source:
        with torch.no_grad():  # not inference_mode: its tensors cannot be sent by Horovod's thread
            for batch in source:
                rows = MicroBatch.of(batch)
                logits.append(model(rows.continuous, rows.categorical).float().cpu().numpy())
                if not batch.rows:  # its carried columns have no type
                    continue
                labels.append(batch.labels.copy())
                for name in carried:
                    columns[name].append(batch.carried[name])
                for name, place in places.items():
                    columns[name].append(batch.codes[:, place].copy())
    return Predictions(
        _joined(logits, np.float32),
        _joined(labels, np.float32),
        {name: _joined(columns[name], object) for name in carried},
        {name: _joined(columns[name], np.int64) for name in codes},
    )


def _joined(parts: Sequence[npt.NDArray[Any]], empty: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, empty)
