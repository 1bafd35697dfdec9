"""A model and its steps on a device: as on the CPU, and no tensor on the wrong side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm import World
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Model, Optimizer
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.sharded_model import ShardedModel
from headrace.train.loop.trainer import EagerForward, GraphedForward
from headrace.train.micro_batch import MicroBatch
from headrace.train.optim import DenseOptimizer
from headrace.train.setup.state import place
from tests.gpu.conftest import HAS_GPU
from tests.gpu.pretended import ELSEWHERE, Elsewhere, pretend

SCHEMA = DatasetSchema(
    features=(
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=50),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, length=3, is_list=True),
        Feature(name="raw", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True, length=2, is_list=True),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)


def trained(device: Any, precision: Any = "fp32") -> tuple[list[float], ShardedModel]:
    settings = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1)
    shape = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,))
    model = ShardedModel(SCHEMA, shape, LocalCollective(), 3, settings=settings, device=device)
    model.precision = precision
    model.configure_optimizer(settings)
    dense = DenseOptimizer(model.dense_parameters(), Optimizer(kind="adam", learning_rate=0.01), LocalCollective())
    passes = EagerForward(model, 6) if device == "cpu" else GraphedForward(model, 6, None if HAS_GPU else again)
    losses, rng = [], np.random.default_rng(1)
    for _ in range(3):
        continuous = torch.from_numpy(rng.normal(size=(6, 1)).astype(np.float32))
        codes = torch.from_numpy((rng.random((6, 6)) * np.array([50, 9, 9, 9, 20, 20])).astype(np.int64))
        labels = torch.from_numpy((rng.random(6) < 0.4).astype(np.float32)).to(model.device)
        part = MicroBatch(continuous, CategoricalBatch.of_padded(codes, SCHEMA), labels)
        result = passes(part, model.prepare(part.categorical))
        result.backward()
        total, _ = dense.reduce(float(result.loss))
        dense.step(0.01)
        model.step_embeddings(0.1)
        losses.append(total)
    return losses, model


def again(work: Callable[[], None]) -> Callable[[], None]:
    """Run the work again, in the place of a recorder."""
    work()
    return work


def test_steps_equal_those_of_the_cpu(elsewhere: None) -> None:
    """On a GPU, else on the pretended one: the interaction by its kernel, the dense part as a graph."""
    expected, cpu_model = trained("cpu")
    with nullcontext() if HAS_GPU else pretend():
        actual, device_model = trained("cuda" if HAS_GPU else ELSEWHERE)
        state = {name: x.cpu() for name, x in device_model.dense_state().items()}
    assert all(p.is_cuda if HAS_GPU else isinstance(p, Elsewhere) for p in device_model.parameters())
    near = {"rtol": 1e-2, "atol": 1e-3} if HAS_GPU else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(actual, expected, rtol=near["rtol"])
    for name, x in cpu_model.dense_state().items():
        torch.testing.assert_close(state[name], x, **near)


def test_a_rank_is_told_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place("cpu", World()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="sees no GPU"):
        place("cuda", World())
    fourth = World(rank=3, size=4, local_rank=3, local_size=4)
    for count, number in ((1, 0), (4, 3), (8, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert place("cuda", fourth) == torch.device("cuda", number)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="4 ranks on a machine with 2 GPUs"):
        place("cuda", fourth)
