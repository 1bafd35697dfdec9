"""Forward passes whose dense part is recorded once and repeated: those of torch, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Model, Optimizer, Train
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.sharded_model import ShardedModel
from headrace.train.loop.trainer import EagerForward, ForwardBackward, GraphedForward
from headrace.train.micro_batch import MicroBatch
from headrace.train.optim import DenseOptimizer
from tests.unit.test_models_dlrm import MODEL, SCHEMAS, batch


class Recorder:
    """A stand-in for a CUDA graph: repeats what it saw, into the same memory."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        for _ in range(2):
            work()

        def repeat() -> None:
            self.repeated += 1
            work()

        return repeat


def trained(
    make: Callable[[ShardedModel], ForwardBackward], shape: Model, rows: list[int]
) -> tuple[list[float], ShardedModel]:
    """Two parts a step; rows of each."""
    model = ShardedModel(SCHEMAS["both"], shape, LocalCollective(), 3)
    model.configure_optimizer(EmbeddingOptimizer())
    dense = DenseOptimizer(model.dense_parameters(), Optimizer(kind="adam", learning_rate=0.01), LocalCollective())
    passes, losses = make(model), []
    model.train()
    for i, count in enumerate(rows):
        torch.manual_seed(i)
        continuous, codes, labels = batch(model.schema, i, count)
        part = MicroBatch(continuous, CategoricalBatch.of_padded(codes, model.schema), labels)
        result = passes(part, model.prepare(part.categorical))
        losses.append(float(result.loss))
        result.backward()
        if i % 2:
            dense.reduce(0.0)
            dense.step()
            model.step_embeddings()
    return losses, model


@pytest.mark.parametrize(
    ("shape", "repeated", "message"),
    [
        (MODEL, 5, "a micro-batch of 7 rows, captured were 9"),
        (MODEL.model_copy(update={"dropout": 0.3}), 0, "dropout draws"),
    ],
)
def test_what_is_repeated_is_what_torch_does(
    shape: Model, repeated: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, recorder = [9, 9, 9, 7, 9, 9], Recorder()
    with caplog.at_level(logging.WARNING):
        losses, model = trained(lambda m: GraphedForward(m, 18, recorder), shape, rows)
    expected, plain = trained(lambda m: EagerForward(m, 18), shape, rows)
    assert losses == expected
    assert recorder.repeated == repeated
    assert message in caplog.text
    assert caplog.text.count("without a graph") == 1
    assert torch.equal(model.embeddings.weight, plain.embeddings.weight)
    for name, x in plain.dense_state().items():
        assert torch.equal(model.dense_state()[name], x), name


class SharedMemory(Recorder):
    """Memory of a CUDA graph: each replay writes its outputs where the one before wrote them."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        repeat = super().__call__(work)
        forward: GraphedForward = work.__self__  # type: ignore[attr-defined]

        def into_the_same_memory() -> None:
            repeat()
            results = [forward._vectors.grad, forward._loss]
            if not self.outputs:
                self.outputs = [x.clone() for x in results]
            for place, x in zip(self.outputs, results, strict=True):
                place.copy_(x)
            forward._vectors.grad, forward._loss = self.outputs

        return into_the_same_memory


def test_gradients_of_micro_batches_outlive_the_replay_of_the_next() -> None:
    """Two micro-batches a step: what the first said of the tables is there when the step is taken."""
    rows = [9] * 6
    losses, model = trained(lambda m: GraphedForward(m, 18, SharedMemory(), accumulate=2), MODEL, rows)
    expected, plain = trained(lambda m: EagerForward(m, 18), MODEL, rows)
    assert losses == expected
    assert torch.equal(model.embeddings.weight, plain.embeddings.weight)
    for name, x in plain.dense_state().items():
        assert torch.equal(model.dense_state()[name], x), name


def test_where_nothing_can_be_recorded_torch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fails(work: Callable[[], None]) -> Callable[[], None]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    losses, _ = trained(lambda m: GraphedForward(m, 18, fails), MODEL, [9, 9])
    assert losses == trained(lambda m: EagerForward(m, 18), MODEL, [9, 9])[0]
    assert caplog.text.count("without a graph: operation not permitted when stream is capturing") == 1


class Asks(torch.nn.Module):
    """Its loss asks for what no graph has."""

    def __init__(self, features: InputFeatures, operation: str) -> None:
        super().__init__()
        self.operation, self.linear = operation, torch.nn.Linear(features.flat_columns, 1)

    def forward(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"logits": self.linear(inputs.flat).squeeze(1)}

    def loss(self, outputs: dict[str, torch.Tensor], inputs: Inputs) -> torch.Tensor:
        gathered = inputs.all_gather(outputs["logits"]) if self.operation == "rows" else inputs.ids("user")
        assert isinstance(gathered, torch.Tensor)
        return outputs["logits"].sum() + gathered.sum()


@pytest.mark.parametrize(
    ("operation", "message"),
    [("rows", "the model gathers over the ranks"), ("ids", "the model asks for the ids of 'user'")],
)
def test_what_no_graph_has_is_refused(operation: str, message: str) -> None:
    shape = Model.model_validate(
        {"class": f"{Asks.__module__}:Asks", "embedding_dim": 4, "args": {"operation": operation}}
    )
    with pytest.raises(UserError, match=rf"train\.cuda_graphs: {message}.*set it to false"):
        trained(lambda m: GraphedForward(m, 18, Recorder()), shape, [9])
    assert len(trained(lambda m: EagerForward(m, 18), shape, [9])[0]) == 1


@pytest.mark.parametrize("options", [{"precision": "tf32"}, {"cuda_graphs": True}])
def test_what_is_of_gpus_is_refused_elsewhere(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is for `device: cuda`"):
        Train.model_validate(options)
    assert Train.model_validate(options | {"device": "cuda"}).device == "cuda"
