"""A small training job, the weights that it ends with, and a dataset read back row by row in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config import EmbeddingOptimizer, Model, Optimizer, Train
from headrace.config.schema import DatasetSchema, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.job import Job

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


def read_padded(files: Iterable[Path], schema: DatasetSchema) -> pd.DataFrame:
    """All rows of Parquet files with the columns of a batch: a list as `length` columns, 0 behind its end."""
    return padded(pa.concat_tables([pq.read_table(f) for f in files]), schema)


def padded(table: pa.Table, schema: DatasetSchema) -> pd.DataFrame:
    """The same of a table."""
    out = {}
    for f in schema.features:
        column = table.column(f.name)
        if not f.is_list:
            out[f.name] = column.to_pandas()
            continue
        rows = column.to_pylist()
        assert all(len(r) <= f.length and r[-1:] != [0] for r in rows), f.name
        for i, name in enumerate(f.physical):
            out[name] = pd.Series(np.array([r[i] if i < len(r) else 0 for r in rows], f.dtype))
    return pd.DataFrame(out)


def padded_codes(batch: Batch, schema: DatasetSchema) -> np.ndarray:
    """The categorical features of a batch side by side, a list as `length` columns, 0 behind its end: int64 [B, S]."""
    scalars, columns = iter(batch.codes.T), []
    for f in schema.of(Kind.CATEGORICAL):
        if not f.is_list:
            columns.append(next(scalars))
            continue
        lists = batch.lists[f.name]
        rows = [lists.values[a:b].tolist() for a, b in zip(lists.offsets, lists.offsets[1:], strict=False)]
        assert len(rows) == batch.rows
        columns += [np.array([r[i] if i < len(r) else 0 for r in rows], np.int64) for i in range(f.length)]
    return np.stack(columns, axis=1) if columns else np.empty((batch.rows, 0), np.int64)
