"""The step as training takes it: headrace's own model, tables and optimizers, in one process, without a loader.

Needs pydantic beside torch and Triton, for the classes of the spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.clock import Clock, Row
from bench.gpu.data import DENSE, DIM, batches


def product_rows(clock: Clock, sizes: list[int], kind: str, batch: int, storage: Any, dense: Any) -> Iterator[Row]:
    """Measure steps from ids on the host to the last optimizer; on a GPU the dense part as a graph."""
    from headrace.comm.base import LocalCollective
    from headrace.config import EmbeddingOptimizer, Model, Optimizer
    from headrace.embeddings.sharding_plan import Lookup, Plan, Table, row_wise
    from headrace.models.categorical import CategoricalBatch
    from headrace.models.sharded_model import ShardedModel
    from headrace.schema import DatasetSchema, Feature, Kind
    from headrace.train.loop.trainer import EagerForward, GraphedForward
    from headrace.train.micro_batch import MicroBatch
    from headrace.train.optim import DenseOptimizer

    numbers = [Feature(name=f"i{i}", kind=Kind.CONTINUOUS, dtype="float32") for i in range(DENSE)]
    ids = [Feature(name=f"c{i}", kind=Kind.CATEGORICAL, dtype="int32", cardinality=n) for i, n in enumerate(sizes)]
    schema = DatasetSchema(features=(*numbers, *ids, Feature(name="click", kind=Kind.LABEL, dtype="float32")))
    settings = EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
    shape = Model(embedding_dim=DIM, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256))

    def plan(tables: Sequence[Table], lookups: Sequence[Lookup], world: int) -> Plan:
        return row_wise([replace(t, storage=storage) for t in tables], lookups, world)

    model = ShardedModel(schema, shape, LocalCollective(), 1, plan, settings, clock.device)
    model.precision = dense
    model.configure_optimizer(settings)
    optimizer = DenseOptimizer(model.dense_parameters(), Optimizer(kind="sgd"), LocalCollective())
    passes = GraphedForward(model, batch) if clock.device == "cuda" else EagerForward(model, batch)
    first = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    parts = [
        MicroBatch(b.dense, CategoricalBatch(b.addresses.view(batch, -1).cpu() - first), b.label.squeeze(1))
        for b in batches(kind, sizes, batch, 4, clock.device)
    ]
    model.train()

    def step(repeat: int) -> None:
        part = parts[repeat % len(parts)]
        outcome = passes(part, model.prepare(part.categorical))
        outcome.backward()
        optimizer.reduce(float(outcome.loss))
        optimizer.step()
        model.step_embeddings()

    seconds = clock.seconds(step)
    yield {"what": f"training's own step, {kind}, {batch}", "value": batch / seconds / 1e6, "unit": "M samples/s"}
