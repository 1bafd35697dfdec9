"""Forward and backward pass of a micro-batch, as torch runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.models.inputs import Inputs
from headrace.models.sharded_model import PendingLookups, ShardedModel
from headrace.train.micro_batch import MicroBatch


@dataclass(frozen=True)
class Forward:
    """A forward pass that was made: the micro-batch's share of the step's mean loss, [], and what goes backward."""

    loss: Tensor
    backward: Callable[[], None]


class ForwardBackward(Protocol):
    """What makes forward passes."""

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        """Collective: the lookups end."""


class EagerForward:
    """As torch runs it. `batch_size`: rows of a step over all ranks."""

    def __init__(self, model: ShardedModel, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        given = batch.labels, batch.weights, batch.targets, batch.lists
        inputs = self._model.inputs_of(batch.continuous, lookups, *given)
        loss = self.loss(inputs)
        return Forward(loss.detach(), lambda: torch.autograd.backward(loss))

    def loss(self, inputs: Inputs) -> Tensor:
        """Sum over the micro-batch's rows / rows of the step, []."""
        return self._model.loss(self._model.outputs(inputs), inputs) / self._batch_size
