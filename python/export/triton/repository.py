"""Exported models as a model repository of Triton.

The repository has these models for a pipeline NAME, all with the same version:

    NAME.features           raw columns to features: ONNX, or the Python back end where ONNX lacks an operator
    NAME.model              features to predictions: ONNX; trees: ONNX, or NAME.matrix and NAME.trees (FIL)
    NAME                    the ensemble of the two
    NAME.query.features, NAME.query, NAME.index, NAME.retrieve     of a model in retrieval form whose items have codes:
                            raw columns to vectors, the items nearest to them, the ensemble of the three
"""

from __future__ import annotations

from typing import Any

import onnx

from headrace.errors import UserError
from headrace.export.record import MODEL, QUERY, ExportRecord, GraphTensor, read_record
from headrace.export.tree_graph import MATRIX, check_exportable, matrix_graph
from headrace.export.triton import config as triton
from headrace.export.triton.config import (
    DEFAULTS,
    Batching,
    EnsembleStep,
    ModelConfig,
    Options,
    column_tensors,
    graph_tensor,
)
from headrace.export.triton.parts import (
    GRAPH_FILE,
    ensemble,
    features_model,
    features_step,
    graph_model,
    graph_step,
    index_model,
    item_keys,
    load_workflow,
)
from headrace.export.triton.publish import RepositoryModel, publish
from headrace.models.predictor import ONLY_TASK
from headrace.storage import Location


def write_repository(
    exported: Location, saved: Location, repository: Location, *, name: str, version: int, options: Options = DEFAULTS
) -> None:
    """Add a version to a model repository, created where it is missing; see headrace.export.triton.publish.

    Args:
        exported: an export of format ONNX, on the repository's file system: its files are shared.
        saved: the saved model, with its fitted workflow.
        repository: the folder that Triton serves.
        name: name of the ensemble, and prefix of its models' names.
        version: version of the ensemble's models.
        options: see Options.

    Raises:
        UserError: the folder holds no export of ONNX graphs; see also `publish`.
    """
    record = read_record(exported)
    if record.format != "onnx":
        raise UserError(f"{exported} is of the format {record.format}: a model repository is made of ONNX graphs")
    models, ensembles = ranking_models(exported, record, saved, name, version, options)
    if record.items is not None:
        retrieval, retrieve = retrieval_models(exported, record, saved, name, version, options)
        models, ensembles = [*models, *retrieval], [*ensembles, retrieve]
    publish(repository, models, ensembles, version, options.keep)


def ranking_models(
    exported: Location, record: ExportRecord, saved: Location, name: str, version: int, options: Options
) -> tuple[list[RepositoryModel], list[ModelConfig]]:
    """Return the models, and the ensemble of them that predicts rows from raw columns."""
    workflow, folder = load_workflow(saved)
    graph, batching = record.graphs[MODEL], options.batching
    features, columns = features_model(f"{name}.features", workflow, folder, batching, [t.name for t in graph.inputs])
    schema = record.dataset_schema
    if record.kind == "xgboost" and options.trees == "fil":
        matrix, trees = fil_models(saved, record, name, batching)
        last = RepositoryModel(ModelConfig(name, (), (graph_tensor(graph.outputs[0]),), batching), lambda to: None)
        steps: tuple[EnsembleStep, ...] = (
            features_step(features, version),
            graph_step(matrix, version),
            _fil_step(trees, version),
        )
        models = [features, matrix, trees]
    else:
        last = graph_model(f"{name}.model", graph, exported, schema, batching)
        steps = (features_step(features, version), graph_step(last, version))
        models = [features, last]
    return models, [ensemble(name, column_tensors(columns), steps, last, batching, version)]


def retrieval_models(
    exported: Location, record: ExportRecord, saved: Location, name: str, version: int, options: Options
) -> tuple[list[RepositoryModel], ModelConfig]:
    """Return the models, and the ensemble of them that finds the items of the vocabulary nearest to a user."""
    workflow, _ = load_workflow(saved)
    models, columns, steps = query_models(exported, record, saved, name, version, options)
    keys, vectors = item_keys(workflow, exported, record)
    index = index_model(f"{name}.index", keys, vectors, options)
    steps = (*steps, index_step(index, version))
    models = [*models, index]
    return models, ensemble(f"{name}.retrieve", column_tensors(columns), steps, index, options.batching, version)


def query_models(
    exported: Location, record: ExportRecord, saved: Location, name: str, version: int, options: Options
) -> tuple[list[RepositoryModel], Any, tuple[EnsembleStep, ...]]:
    """Return the models that make vectors of users, their raw columns, and the ensemble's steps."""
    workflow, folder = load_workflow(saved)
    graph = record.graphs[QUERY]
    names = [t.name for t in graph.inputs]
    features, columns = features_model(f"{name}.query.features", workflow, folder, options.batching, names)
    query = graph_model(f"{name}.query", graph, exported, record.dataset_schema, options.batching)
    return [features, query], columns, (features_step(features, version), graph_step(query, version))


def index_step(index: RepositoryModel, version: int) -> EnsembleStep:
    """Return the step that finds the items of a query's vector."""
    outputs = {t.name: t.name for t in index.config.outputs}
    return EnsembleStep(index.config.name, version, {t.name: t.name for t in index.config.inputs}, outputs)


def fil_models(
    saved: Location, record: ExportRecord, name: str, batching: Batching
) -> tuple[RepositoryModel, RepositoryModel]:
    """Return the graph of the trees' input matrix, and the trees as XGBoost's JSON for the back end FIL."""
    import xgboost as xgb

    booster = xgb.Booster()
    booster.load_model((saved / "model.ubj").local_path())
    check_exportable(booster)
    width = booster.num_features()
    graph = record.graphs[MODEL]
    matrix_proto = matrix_graph(record.dataset_schema)
    output = graph_tensor(GraphTensor(name=MATRIX, dtype="float32", shape=("rows", width)))
    inputs = tuple(map(graph_tensor, graph.inputs))

    def fill_matrix(to: Location) -> None:
        (to / GRAPH_FILE).put_bytes(matrix_proto.SerializeToString())
        onnx.checker.check_model(str((to / GRAPH_FILE).local_path()))

    def fill_trees(to: Location) -> None:
        (to / "xgboost.json").put_bytes(bytes(booster.save_raw("json")))

    # Without classes, FIL returns the objective's output: a probability, or the number itself.
    parameters = {"model_type": "xgboost_json", "is_classifier": "false", "xgboost_allow_unknown_field": "true"}
    trees = ModelConfig(
        f"{name}.trees",
        (triton.TritonTensor("input__0", "float32", (width,)),),
        (triton.TritonTensor("output__0", "float32", (1,)),),
        batching,
        "fil",
        parameters=parameters,
    )
    matrix = ModelConfig(f"{name}.matrix", inputs, (output,), batching, "onnxruntime", kind="KIND_CPU")
    return RepositoryModel(matrix, fill_matrix), RepositoryModel(trees, fill_trees)


def _fil_step(trees: RepositoryModel, version: int) -> EnsembleStep:
    return EnsembleStep(trees.config.name, version, {"input__0": MATRIX}, {"output__0": ONLY_TASK})
