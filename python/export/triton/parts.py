"""The models that an ensemble is made of: features, a graph, trees."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from headrace.export.features.columns import FEATURE, RawColumn
from headrace.export.features.graph_file import faults, write_features
from headrace.export.features.python_step import FeaturesStep
from headrace.export.record import Graph
from headrace.export.triton import backends
from headrace.export.triton.config import Batching, ModelConfig, Step, Tensor
from headrace.export.triton.publish import Model
from headrace.export.triton.tensors import of_columns, of_feature, of_graph, plain
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.schema import DatasetSchema
from headrace.storage import Location, local

GRAPH_FILE, PYTHON_FILE = "model.onnx", "model.py"
WORKFLOW = "workflow"


def features_model(
    name: str, workflow: FittedWorkflow, folder: Location, batching: Batching, only: Collection[str]
) -> tuple[Model, tuple[RawColumn, ...]]:
    """Raw columns to features: an ONNX graph, or the Python back end where ONNX lacks an operator.

    Args:
        name: of the model.
        workflow: of the saved model.
        folder: of the workflow.
        batching: of its requests.
        only: names of the features.

    Returns:
        the model, and the columns that its requests hold.
    """
    step = FeaturesStep.from_workflow(workflow, tuple(only))
    inputs = of_columns(step.columns)
    outputs = tuple(of_feature(f) for f in step.features)
    lacking = faults(workflow, only)
    if lacking:
        said = {"why Python": "; ".join(lacking)}
        config = ModelConfig(name, plain(inputs), plain(outputs), batching, "python", parameters=said, kind="KIND_CPU")
        return Model(config, lambda to: _fill_python(to, folder)), step.columns

    def fill(to: Location) -> None:
        write_features(workflow, to, GRAPH_FILE, only)

    # Texts and look-ups: nothing that a GPU is better at.
    return Model(ModelConfig(name, inputs, outputs, batching, "onnxruntime", kind="KIND_CPU"), fill), step.columns


def _fill_python(to: Location, workflow: Location) -> None:
    put_backend(to, "features")
    (to / WORKFLOW).copy_from(workflow)


def put_backend(to: Location, name: str) -> None:
    """Write a file of headrace.export.triton.backends as `model.py`."""
    source = Path(next(iter(backends.__path__))) / f"{name}.py"
    (to / PYTHON_FILE).copy_from(local(source))


def graph_model(name: str, graph: Graph, exported: Location, schema: DatasetSchema, batching: Batching) -> Model:
    """Return the model of an export's graph."""

    def fill(to: Location) -> None:
        (to / GRAPH_FILE).copy_from(exported / graph.file, share=True)
        for file in graph.files:
            if file != graph.file:
                (to / file).copy_from(exported / file, share=True)

    inputs, outputs = tuple(map(of_graph, graph.inputs)), tuple(map(of_graph, graph.outputs))
    return Model(ModelConfig(name, inputs, outputs, batching, "onnxruntime", parameters=described(graph, schema)), fill)


def described(graph: Graph, schema: DatasetSchema) -> Mapping[str, str]:
    """Describe each input by the schema, as parameters of a configuration.

    Sizes that grow by the day are not in them.
    """
    features = {f.name: f for f in schema.features}
    kept = ("kind", "dtype", "length", "is_list", "vocabulary", "oov_buckets", "dynamic", "tags", "sources")
    return {
        f"input.{t.name}": json.dumps({k: v for k, v in features[t.name].model_dump(mode="json").items() if k in kept})
        for t in graph.inputs
        if t.name in features
    }


def features_step(model: Model, version: int) -> Step:
    """Return the features' step of an ensemble, whose tensors have the columns' and the features' own names."""
    config = model.config
    return Step(config.name, version, {t.name: t.name for t in config.inputs}, {t.name: t.name for t in config.outputs})


def graph_step(model: Model, version: int) -> Step:
    """Return the step of a graph that takes features; its outputs have the graph's names."""
    inputs, outputs = model.config.inputs, model.config.outputs
    return Step(
        model.config.name, version, {t.name: f"{t.name}{FEATURE}" for t in inputs}, {t.name: t.name for t in outputs}
    )


def ensemble(
    name: str, inputs: tuple[Tensor, ...], steps: tuple[Step, ...], last: Model, batching: Batching, version: int
) -> ModelConfig:
    """Return an ensemble of steps in order; the last one's outputs are the answer."""
    said = {"version": str(version)}
    return ModelConfig(name, plain(inputs), plain(last.config.outputs), batching, steps=steps, parameters=said)


def loaded(saved: Location) -> tuple[FittedWorkflow, Location]:
    """Return the fitted workflow of a saved model, and its folder."""
    return FittedWorkflow.load(saved / WORKFLOW), saved / WORKFLOW
