"""A small training job, and the weights that it ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.config import EmbeddingOptimizer, Model, Optimizer, Train
from headrace.manifest import Manifest
from headrace.models.saved import load_model
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.job import Job
from headrace.workspace import Workspace

TRAIN = Train(
    batch_size=200,
    streams=4,
    epochs=2,
    seed=3,
    checkpoint_steps=5,
    keep=2,
    dense=Optimizer(kind="adam", learning_rate=0.01),
    embeddings=EmbeddingOptimizer(kind="adagrad", learning_rate=0.1),
)
MODEL = Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(16,))


def job_of(
    home: Workspace, features: Manifest, key: str, train: Train = TRAIN, model: Model = MODEL, **more: Any
) -> Job:
    day = {"pipeline": "clicks", "ds": "2026-01-10"}
    run = {"key": key, "features": features, "model": model, "train": train}
    return Job(home=home.home, progress_seconds=0.0, **(day | run | more))


def weights(job: Job) -> dict[str, np.ndarray]:
    model = load_model(job.saved_model)
    tables = {f"embeddings{i or ''}": w.numpy() for i, w in enumerate(model.embeddings.weights)}
    return {k: v.numpy() for k, v in model.dense_state().items()} | tables


def assert_same_weights(a: Job, b: Job) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def first_of(embeddings: Any, table: str) -> int:
    """Return the row at which a table begins in the one matrix of one rank."""
    return next(first for block, _, first in embeddings.layout.fused_tables[0].local_blocks if block.table == table)


class Stopped(Exception):
    """A run that `stop_at` ended."""


def stop_at(step: int) -> Callable[[ProgressEvent], None]:
    """A listener that ends a run behind a step."""

    def say(tick: ProgressEvent) -> None:
        if tick.step == step:
            raise Stopped

    return say
