"""Steps whose loss is finite and whose gradient is not: refused on all ranks before a weight changes, never saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.comm.base import LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Optimizer, Train
from headrace.config.workspace import Workspace
from headrace.embeddings.fused_optimizer import NonFiniteGradient
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding_plan import Lookup, Table, row_wise
from headrace.models import dlrm
from headrace.models import objective as losses
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest
from headrace.train.checkpoint.read import list_steps
from headrace.train.job import Diverged, Job
from headrace.train.loop.run import train, train_local
from tests.train_support import job_of

TRAIN = Train(
    batch_size=200,
    streams=4,
    epochs=1,
    seed=3,
    checkpoint_steps=5,
    keep=2,
    patience=None,
    dense=Optimizer(kind="adam", learning_rate=0.01),
    embeddings=EmbeddingOptimizer(kind="adagrad", learning_rate=0.1),
)


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Manifest]) -> Callable[..., Job]:
    ws = Workspace(tmp_path_factory.mktemp("divergence"))
    features = make_dataset(ws, train=4_000, valid=200)  # 20 steps

    def make(key: str, **settings: Any) -> Job:
        return job_of(ws, features, key, TRAIN.model_copy(update=settings))

    return make


class Spoiled(torch.autograd.Function):
    """A tensor as it is, whose gradient is spoiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spoil: Callable[[Tensor], None]) -> Tensor:
        ctx.spoil = spoil
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        ctx.spoil(grad)
        return grad, None


def weights(job: Job) -> dict[str, np.ndarray]:
    model = load_model(job.saved_model)
    return {k: v.numpy() for k, v in model.dense_state().items()} | {"embeddings": model.embeddings.weight.numpy()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_of_the_dense_part_is_refused_and_the_run_goes_on_from_before(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    torch.set_num_threads(1)
    undisturbed, job = make_job(f"undisturbed-{value}"), make_job(f"dense-{value}")
    train_local(undisturbed)
    real, calls = losses.binary_cross_entropy, []

    def spoil(grad: Tensor) -> None:
        calls.append(1)
        if len(calls) == 13:
            grad[7] = value

    def loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return real(Spoiled.apply(logits, spoil), *args, **kwargs)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(losses, "binary_cross_entropy", loss)
    with pytest.raises(Diverged, match=r"the gradient of .*'top\.0\.weight'.* is not finite at step 13") as e:
        train_local(job)
    assert e.value.step == 13
    assert list_steps(job.checkpoints) == [10, 5]
    assert train_local(job).resumed_from_step == 10
    for name, x in weights(undisturbed).items():
        np.testing.assert_array_equal(weights(job)[name], x, err_msg=name)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_bad_gradient_of_one_table_on_one_rank_stops_all_ranks_and_is_named(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    """bf16: the vectors are a tensor. Their gradient alone is bad: the dense part's are as they should be."""
    embeddings = TRAIN.embeddings.model_copy(update={"clip_norm": clip})
    job = make_job(f"table-{clip}", precision="bf16", embeddings=embeddings)
    real, calls = dlrm.dot_interaction, []
    number = [f.name for f in job.features.dataset_schema.features if f.cardinality].index("item")  # type: ignore[union-attr]

    def spoil(grad: Tensor) -> None:
        calls.append(1)
        if len(calls) == 23:  # of one of two ranks, in step 12
            grad[3, number, 1] = float("nan")

    def pairs(bottom: Tensor, vectors: Any) -> Tensor:
        return real(bottom, Spoiled.apply(vectors, spoil) if vectors.requires_grad else vectors)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(dlrm, "dot_interaction", pairs)
    raised: list[Diverged] = []

    def rank(collective: Any) -> None:
        with pytest.raises(Diverged, match=r"the gradient of table 'item' is not finite at step 12") as e:
            train(job, collective)
        raised.append(e.value)

    run_ranks(2, rank)
    assert [e.step for e in raised] == [12, 12]
    assert list_steps(job.checkpoints) == [10, 5]


def test_clipping_lets_no_bad_gradient_through() -> None:
    def apply(value: float) -> tuple[Tensor, Tensor]:
        plan = row_wise([Table("a", 10, 4)], [Lookup("f", "a", 1)], 1)
        tables = ShardedEmbeddings(plan, LocalCollective(), seed=1)
        tables.configure_optimizer(EmbeddingOptimizer(kind="adagrad", clip_norm=1.0))
        start_weights = tables.weight.clone()
        out = tables(torch.tensor([[3], [4]]))
        grad = torch.ones_like(out)
        grad[1] = value
        out.backward(grad)
        if np.isfinite(value):
            tables.step()
        else:
            with pytest.raises(NonFiniteGradient, match=r"tables here: a"):
                tables.step()
        return start_weights, tables.weight

    weights_before, weights_after = apply(1.0)
    assert not torch.equal(weights_before, weights_after)
    for value in (float("nan"), float("inf")):
        weights_before, weights_after = apply(value)
        assert torch.equal(weights_before, weights_after)


@pytest.mark.parametrize("background", [False, True])
def test_weights_that_are_bad_are_not_saved(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Whatever spoiled them: here memory, behind the step's back."""
    job = make_job(f"weights-{background}", background_checkpoints=background)
    real, steps = LocalTables.step, []

    def step(self: LocalTables, lr: float | None = None) -> None:
        real(self, lr)
        steps.append(1)
        if len(steps) == 10:
            fused = self.layout.fused_tables[0]
            first = next(first for block, _, first in fused.local_blocks if block.table == "user")
            self.weights[0][first + 1, 2] = float("inf")

    monkeypatch.setattr(LocalTables, "step", step)
    with pytest.raises(Diverged, match=r"table 'user' holds NaN or infinite numbers after step 10"):
        train_local(job)
    assert list_steps(job.checkpoints) == [5]
    assert not job.saved_model.exists()
