"""A network's own lookups on a device: as on the CPU, and no tensor on the wrong side."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Model, Optimizer
from headrace.embeddings.jagged import JaggedTensor
from headrace.models.categorical import CategoricalBatch
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.lookups import EmbeddingLookup
from headrace.models.sharded_model import ShardedModel
from headrace.train.loop.trainer import EagerForward, GraphedForward
from headrace.train.micro_batch import MicroBatch
from headrace.train.optim import DenseOptimizer
from tests.gpu.conftest import HAS_GPU
from tests.gpu.pretended import ELSEWHERE, pretend
from tests.gpu.test_model import SCHEMA, again


class EveryForm(nn.Module):
    """A sequence, pooled lists, another table of a feature, raw ids, drawn ids and all of a vocabulary."""

    def __init__(self, features: InputFeatures) -> None:
        super().__init__()
        self.lookups = (
            EmbeddingLookup("user", "user", 4),
            EmbeddingLookup("bias", "user", 1, table="bias"),
            EmbeddingLookup("tags", "tags", 4, pooling="none"),
            EmbeddingLookup("mean", "tags", 4, pooling="mean"),
            EmbeddingLookup("raw", "raw", 4),
            EmbeddingLookup("drawn", "user", 4, ids="negatives"),
            EmbeddingLookup("users", "user", 4, ids="all"),
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        vectors = {w.name: inputs.embedding(w.name) for w in self.lookups if w.name != "tags"}
        query = vectors["user"] + vectors["mean"] + vectors["raw"]
        query = query + inputs.sequence("tags").pooled("sum") * self.scale
        against = (vectors["drawn"] @ query.unsqueeze(2)).squeeze(2).logsumexp(1) + (
            query @ vectors["users"].T
        ).logsumexp(1)
        return {"logits": query.sum(1) + vectors["bias"].squeeze(1) - against + inputs.continuous[:, 0]}


def trained(device: Any) -> tuple[list[float], list[Tensor]]:
    settings = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1)
    shape = Model.model_validate({"class": f"{__name__}:EveryForm", "embedding_dim": 4})
    model = ShardedModel(SCHEMA, shape, LocalCollective(), 3, settings=settings, device=device)
    model.configure_optimizer(settings)
    model.train()
    dense = DenseOptimizer(model.dense_parameters(), Optimizer(kind="adam", learning_rate=0.01), LocalCollective())
    passes = EagerForward(model, 6) if device == "cpu" else GraphedForward(model, 6, None if HAS_GPU else again)
    losses, rng = [], np.random.default_rng(1)
    for _ in range(3):
        continuous = torch.from_numpy(rng.normal(size=(6, 1)).astype(np.float32)).to(model.device)
        codes = torch.from_numpy(rng.integers(0, 50, (6, 1)))
        lists = [
            JaggedTensor.of_lengths(torch.from_numpy(rng.integers(0, most, 9)), torch.tensor([2, 0, 3, 1, 3, 0]))
            for most in (9, 20)
        ]
        drawn = torch.from_numpy(rng.integers(2, 50, (6, 3)))
        labels = torch.from_numpy((rng.random(6) < 0.4).astype(np.float32)).to(model.device)
        part = MicroBatch(continuous, CategoricalBatch(codes, lists, drawn), labels)
        result = passes(part, model.prepare(part.categorical))
        result.backward()
        total, _ = dense.reduce(float(result.loss))
        dense.step(0.01)
        model.step_embeddings(0.1)
        losses.append(total)
    return losses, [w.cpu() for w in model.embeddings.weights]


def test_steps_equal_those_of_the_cpu(elsewhere: None, caplog: pytest.LogCaptureFixture) -> None:
    expected, cpu_state = trained("cpu")
    with caplog.at_level(logging.WARNING), nullcontext() if HAS_GPU else pretend():
        actual, device_state = trained("cuda" if HAS_GPU else ELSEWHERE)
    assert "without a graph: the model has lookups of its own" in caplog.text
    near = {"rtol": 1e-2, "atol": 1e-3} if HAS_GPU else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(actual, expected, rtol=near["rtol"])
    for x, y in zip(cpu_state, device_state, strict=True):
        torch.testing.assert_close(y, x, **near)
