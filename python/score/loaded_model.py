"""A saved model and its fitted workflow, loaded once in a process, and predictions of whole rows by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.spark.gpus import gpu_addresses, show_assigned_gpu
from headrace.models.predictor import Predictor, load_predictor, maps_of
from headrace.score.pair_features import BLOCK_PAIRS, Columns, PairFeatures
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace, on_this_host


@lru_cache(maxsize=1)
def loaded_model(
    folder: Location,
    threads: int,
    output: str | None,
    maps: HostPlace | None,
    gpu: bool = False,
    joined: frozenset[str] = frozenset(),
) -> tuple[Predictor, FittedWorkflow]:
    """Load a model once in each Python worker, which Spark keeps for its next tasks; a model's folder never changes.

    `maps`: what workers of a host map of models: see Workspace.mapped. None: nothing. `gpu`: the model goes to the GPU
    that Spark assigned to the task, where it stays. `joined`: see TaskInputs.

    Raises:
        UserError: the model is damaged; or there is no such GPU.
    """
    mapped_folder = None if maps is None else maps_of(folder, on_this_host(maps))
    device = _device() if gpu else "cpu"
    predictor = load_predictor(folder, threads, output, mapped_folder, device, joined)
    return predictor, loaded_workflow(folder, maps)


@lru_cache(maxsize=1)
def loaded_workflow(folder: Location, maps: HostPlace | None) -> FittedWorkflow:
    """Return the workflow that a saved model was trained on; `maps`: see `loaded_model`."""
    vocabularies = None if maps is None else maps_of(folder, on_this_host(maps)) / "vocabularies"
    return FittedWorkflow.load(folder / "workflow", maps=vocabularies)


def _device() -> str:
    """Return the GPU of this task and process for torch: an executor has one, and so its workers' tasks."""
    addresses = gpu_addresses()
    if not addresses:
        raise UserError("the tasks that score were to have a GPU each, and Spark assigned none to this one")
    show_assigned_gpu(addresses)
    return "cuda"


def features_of_rows(
    fitted: FittedWorkflow, batch: pa.RecordBatch, context: Mapping[str, pa.Scalar]
) -> Iterator[Columns]:
    """Yield the features of rows, in blocks of bounded size, in their order.

    Args:
        fitted: the workflow that the model was trained on.
        batch: the columns that the features read, and perhaps others.
        context: constants for columns that `batch` lacks.

    Raises:
        UserError: a column is missing or of another type.
    """
    missing = [c for c in fitted.input_columns if c not in batch.schema.names and c not in context]
    if missing:
        raise UserError(
            f"the features of the model read {', '.join(repr(c) for c in missing)}, which the rows lack "
            f"(they have: {', '.join(batch.schema.names)})"
        )
    features = PairFeatures(tuple(batch.schema.names), (), context, fitted)
    for start in range(0, batch.num_rows, BLOCK_PAIRS):
        yield features.row_columns(batch.slice(start, BLOCK_PAIRS))


def predict_rows(
    predictor: Predictor, fitted: FittedWorkflow, batch: pa.RecordBatch, context: Mapping[str, pa.Scalar]
) -> NDArray[np.float32]:
    """Return the model's prediction for each row, in blocks of bounded size: float32 [rows].

    Args:
        predictor: the model.
        fitted, batch, context: see `features_of_rows`.

    Raises:
        UserError: a column is missing or of another type, or the model gives what is no number.
    """
    parts = [predictor.predict(columns) for columns in features_of_rows(fitted, batch, context)]
    out = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not np.isfinite(out).all():
        raise UserError("the model gives scores that are no numbers; train it again (a lower rate?)")
    return out
