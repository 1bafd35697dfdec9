"""The models of ensembles: features, graphs, and indexes of items' vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.schema import DatasetSchema
from headrace.errors import UserError
from headrace.export.features.columns import FEATURE, FeaturesStep, RawColumn
from headrace.export.features.graph_file import faults, write_features
from headrace.export.record import ExportedGraph, ExportRecord
from headrace.export.triton import backends
from headrace.export.triton.config import (
    Batching,
    EnsembleStep,
    ModelConfig,
    Options,
    TritonTensor,
    column_tensors,
    feature_tensor,
    graph_tensor,
    without_reshape,
)
from headrace.export.triton.publish import RepositoryModel
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location, local

GRAPH_FILE, PYTHON_FILE = "model.onnx", "model.py"
WORKFLOW = "workflow"
#: Fewest items for each cell of Faiss's inverted lists, and cells that a search reads.
_ITEMS_OF_A_CELL, _PROBES = 64, 16


def features_model(
    name: str, workflow: FittedWorkflow, folder: Location, batching: Batching, only: Collection[str]
) -> tuple[RepositoryModel, tuple[RawColumn, ...]]:
    """Return the model from raw columns to features: an ONNX graph, or Python if ONNX lacks an operator.

    Args:
        name: name of the model.
        workflow: workflow of the saved model.
        folder: folder of the workflow.
        batching: batching of its requests.
        only: names of the features.

    Returns:
        the model, and the columns of its requests.
    """
    step = FeaturesStep.from_workflow(workflow, tuple(only))
    inputs = column_tensors(step.columns)
    outputs = tuple(feature_tensor(f) for f in step.features)
    gaps = faults(workflow, only)
    if gaps:
        parameters = {"why Python": "; ".join(gaps)}
        config = ModelConfig(
            name,
            without_reshape(inputs),
            without_reshape(outputs),
            batching,
            "python",
            parameters=parameters,
            kind="KIND_CPU",
        )
        return RepositoryModel(config, lambda to: _fill_python(to, folder)), step.columns

    def fill(to: Location) -> None:
        write_features(workflow, to, GRAPH_FILE, only)

    # On the CPU, since a GPU does not speed up texts and look-ups.
    return RepositoryModel(
        ModelConfig(name, inputs, outputs, batching, "onnxruntime", kind="KIND_CPU"), fill
    ), step.columns


def _fill_python(to: Location, workflow: Location) -> None:
    put_backend(to, "features")
    (to / WORKFLOW).copy_from(workflow)


def put_backend(to: Location, name: str) -> None:
    """Write a file of headrace.export.triton.backends as `model.py`."""
    source = Path(next(iter(backends.__path__))) / f"{name}.py"
    (to / PYTHON_FILE).copy_from(local(source))


def graph_model(
    name: str, graph: ExportedGraph, exported: Location, schema: DatasetSchema, batching: Batching
) -> RepositoryModel:
    """Return the model of an export's graph."""

    def fill(to: Location) -> None:
        (to / GRAPH_FILE).copy_from(exported / graph.file, share=True)
        for file in graph.files:
            if file != graph.file:
                (to / file).copy_from(exported / file, share=True)

    inputs, outputs = tuple(map(graph_tensor, graph.inputs)), tuple(map(graph_tensor, graph.outputs))
    return RepositoryModel(
        ModelConfig(name, inputs, outputs, batching, "onnxruntime", parameters=input_descriptions(graph, schema)), fill
    )


def input_descriptions(graph: ExportedGraph, schema: DatasetSchema) -> Mapping[str, str]:
    """Describe each input by the schema, as parameters of a configuration, without sizes that grow every day."""
    features = {f.name: f for f in schema.features}
    described_keys = ("kind", "dtype", "length", "is_list", "vocabulary", "oov_buckets", "dynamic", "tags", "sources")
    return {
        f"input.{t.name}": json.dumps(
            {k: v for k, v in features[t.name].model_dump(mode="json").items() if k in described_keys}
        )
        for t in graph.inputs
        if t.name in features
    }


def features_step(model: RepositoryModel, version: int) -> EnsembleStep:
    """Return the features' step of an ensemble; its tensors have the names of columns and features."""
    config = model.config
    return EnsembleStep(
        config.name, version, {t.name: t.name for t in config.inputs}, {t.name: t.name for t in config.outputs}
    )


def graph_step(model: RepositoryModel, version: int) -> EnsembleStep:
    """Return the step of a graph over features; its outputs have the graph's names."""
    inputs, outputs = model.config.inputs, model.config.outputs
    return EnsembleStep(
        model.config.name, version, {t.name: f"{t.name}{FEATURE}" for t in inputs}, {t.name: t.name for t in outputs}
    )


def ensemble(
    name: str,
    inputs: tuple[TritonTensor, ...],
    steps: tuple[EnsembleStep, ...],
    last: RepositoryModel,
    batching: Batching,
    version: int,
) -> ModelConfig:
    """Return an ensemble of steps, in order; the outputs of the last one are the answer."""
    parameters = {"version": str(version)}
    return ModelConfig(
        name,
        without_reshape(inputs),
        without_reshape(last.config.outputs),
        batching,
        steps=steps,
        parameters=parameters,
    )


def load_workflow(saved: Location) -> tuple[FittedWorkflow, Location]:
    """Return the fitted workflow of a saved model, and its folder."""
    return FittedWorkflow.load(saved / WORKFLOW), saved / WORKFLOW


def item_keys(
    workflow: FittedWorkflow, exported: Location, record: ExportRecord
) -> tuple[list[str], NDArray[np.float32]]:
    """Return all items of an export's vocabulary: values as texts, and vectors [items, D] (mapped)."""
    items = record.items
    assert items is not None
    table = workflow.vocabularies[items.vocabulary].table.sort_by("code")
    codes = table.column("code").to_numpy()
    vectors = np.load((exported / items.file).local_path(), mmap_mode="r")
    if len(codes) and not items.first_code <= int(codes[0]) <= int(codes[-1]) < len(vectors):
        raise UserError(f"{exported / items.file} has {len(vectors)} rows, and codes go to {int(codes[-1])}")
    return table.column("value").to_pylist(), vectors[codes]


def index_model(name: str, keys: list[str], vectors: NDArray[np.float32], options: Options) -> RepositoryModel:
    """Return the model from `query_vector` [rows, D] to `item`, `item_row`, `item_score` [rows, k], best first.

    With fewer items the outputs end with "", -1 and minus infinity.

    Args:
        name: name of the model.
        keys: keys of the items.
        vectors: vectors of the items, float32 [items, D].
        options: number of items, and method of the search.
    """
    exact = options.index == "exact"
    parameters = {"found": str(options.candidates), "index": options.index} | (
        {} if exact else {"probes": str(_PROBES)}
    )
    k = (options.candidates,)
    config = ModelConfig(
        name,
        (TritonTensor("query_vector", "float32", (vectors.shape[1],)),),
        (
            TritonTensor("item", "object", k),
            TritonTensor("item_row", "int64", k),
            TritonTensor("item_score", "float32", k),
        ),
        options.batching,
        "python",
        parameters=parameters,
        kind="KIND_CPU",
    )

    def fill(to: Location) -> None:
        put_backend(to, "index")
        save_array(to / "vectors.npy", np.ascontiguousarray(vectors, np.float32))
        save_array(to / "keys.npy", np.array(keys, np.str_))
        if not exact:
            _write_faiss(to / "index.faiss", np.ascontiguousarray(vectors, np.float32))

    return RepositoryModel(config, fill)


def save_array(file: Location, values: NDArray[Any]) -> None:
    """Save an array in NumPy's format, without pickle: texts have a fixed width."""
    with file.new_file() as path, open(path, "wb") as out:
        np.save(out, values, allow_pickle=False)


def _write_faiss(file: Location, vectors: NDArray[np.float32]) -> None:
    """Write Faiss's inverted lists of uncompressed vectors, searched by inner product."""
    import faiss

    items, width = vectors.shape
    cells = max(1, min(int(2 * math.sqrt(items)), items // _ITEMS_OF_A_CELL))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    with file.new_file() as path:
        faiss.write_index(index, str(path))
