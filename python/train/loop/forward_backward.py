"""Forward and backward pass of a micro-batch, as torch runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.models.dlrm import DLRM, PendingLookups
from headrace.models.losses.pointwise import binary_cross_entropy
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

    def __init__(self, model: DLRM, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        loss = self.loss(self._model(batch.continuous, lookups), batch.labels, batch.weights)
        return Forward(loss.detach(), lambda: torch.autograd.backward(loss))

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum over the micro-batch's rows / rows of the step: logits, labels, weights float32 [B] -> []."""
        return binary_cross_entropy(logits, labels, weights) / self._batch_size
