"""Prediction of a split: each rank predicts the rows of its own streams and holds the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config.schema import DatasetSchema, Kind
from headrace.dataset.layout import SplitLayout
from headrace.dataset.loaders import EvalLoader
from headrace.models.categorical import CategoricalBatch
from headrace.train.carried_columns import TaskLabels
from headrace.train.evaluation.evaluate import Predictions
from headrace.train.evaluation.policy import Choices, Policy, ScoreAction
from headrace.train.evaluation.ranks import F32
from headrace.train.micro_batch import MicroBatch

_FIRST_ROWS = 1 << 16


class GrowingColumn:
    """A column that grows batch by batch, in one array.

    A list of the batches' arrays would fragment the heap: small arrays that stay, between the megabytes that the model
    allocates and frees for each batch. That cost 600 bytes a row.

    Args:
        dtype: the type of an empty column.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._values: npt.NDArray[Any] | None = None
        self._rows = 0

    def add(self, values: npt.NDArray[Any]) -> None:
        """Add rows [n]. The column takes the common type of its own rows and these."""
        end = self._rows + len(values)
        if self._values is None:
            self._values = np.empty(max(_FIRST_ROWS, end), values.dtype)
        dtype = np.promote_types(self._values.dtype, values.dtype)
        if end > len(self._values) or dtype != self._values.dtype:
            larger = np.empty(max(2 * len(self._values), end) if end > len(self._values) else len(self._values), dtype)
            larger[: self._rows] = self._values[: self._rows]
            self._values = larger
        self._values[self._rows : end] = values
        self._rows = end

    @property
    def array(self) -> npt.NDArray[Any]:
        """The rows that were added, [n], as a view."""
        return np.empty(0, self._dtype) if self._values is None else self._values[: self._rows]


class PredictingModel(Protocol):
    """A model that predicts."""

    def outputs_of(self, continuous: Tensor, batch: CategoricalBatch) -> Mapping[str, Tensor]:
        """Return `logits` [B] and the output of each task, for continuous columns [B, C] and categorical features."""


def predict_split(
    model: PredictingModel,
    layout: SplitLayout,
    schema: DatasetSchema,
    collective: Collective,
    *,
    batch_size: int,
    streams: int,
    carried: Sequence[str] = (),
    codes: Sequence[str] = (),
    tasks: TaskLabels | None = None,
    policy: Policy | None = None,
) -> Predictions:
    """Predict every row of a split once, over all ranks. Collective: every rank calls it.

    Args:
        carried: carried columns to return as well.
        codes: categorical features of one code a row to return as well.
        tasks: labels of further tasks, whose outputs and labels are returned; None: only the model's logits.
        policy: the policy whose choices are predicted, by one more pass over each batch for each action; None: none.

    Raises:
        UserError: a file is damaged, or a label is not valid.
    """
    names = () if tasks is None else tasks.names
    read_columns = carried if tasks is None else tasks.with_label_columns(carried)
    scalars = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    code_columns = {name: scalars.index(name) for name in codes}
    logits, labels = GrowingColumn(np.float32), GrowingColumn(np.float32)
    columns = {name: GrowingColumn(object) for name in carried} | {name: GrowingColumn(np.int64) for name in codes}
    outputs = {name: GrowingColumn(np.float32) for name in names}
    targets = {name: GrowingColumn(np.float32) for name in names}
    chosen, expected = GrowingColumn(np.float64), GrowingColumn(np.float64)
    with EvalLoader(
        layout, schema, collective.world, batch_size=batch_size, streams=streams, carried=read_columns
    ) as source:
        with torch.no_grad():  # not inference_mode: its tensors cannot be sent by Horovod's thread
            for batch in source:
                rows = MicroBatch.from_batch(batch, labels=tasks)
                outputs_of_batch = model.outputs_of(rows.continuous, rows.categorical)
                logits.add(outputs_of_batch["logits"].float().cpu().numpy())
                if policy is not None:
                    logged = batch.codes[:, scalars.index(policy.actions.feature)].copy()
                    choices = policy.choose(logged, _scorer(model, rows, schema))
                    chosen.add(choices.chosen)
                    expected.add(choices.expected)
                for name in names:
                    outputs[name].add(outputs_of_batch[name].float().cpu().numpy())
                    targets[name].add(rows.targets[name].numpy())
                if not batch.rows:  # the carried columns of an empty batch have no type
                    continue
                labels.add(batch.labels)
                for name in carried:
                    columns[name].add(batch.carried[name])
                for name, code_column in code_columns.items():
                    columns[name].add(batch.codes[:, code_column])
    return Predictions(
        logits.array,
        labels.array,
        {name: columns[name].array for name in carried},
        {name: columns[name].array for name in codes},
        {name: column.array for name, column in outputs.items()},
        {name: column.array for name, column in targets.items()},
        choices=None if policy is None else Choices(chosen.array, expected.array),
    )


def _scorer(model: PredictingModel, rows: MicroBatch, schema: DatasetSchema) -> ScoreAction:
    """Return a function that predicts the logits of the same rows with other values of some features."""
    continuous, codes = rows.continuous.clone(), rows.categorical.codes.clone()
    categorical = replace(rows.categorical, codes=codes)
    numbers = [name for f in schema.of(Kind.CONTINUOUS) for name in f.physical]
    scalars = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list]

    def score(values: Mapping[str, Any]) -> F32:
        for name, value in values.items():
            if name in scalars:
                codes[:, scalars.index(name)] = value
            else:
                continuous[:, numbers.index(name)] = value
        return model.outputs_of(continuous, categorical)["logits"].float().cpu().numpy()

    return score
