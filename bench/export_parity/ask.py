"""An export's answers, and torch's to the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from bench.export_parity.cases import Batch, ExportCase, tensors
from headrace.embeddings.storage import DTYPES, decode, encode
from headrace.export.network import ITEM_VECTOR, QUERY_VECTOR, ExportedNetwork
from headrace.export.record import ITEM, MODEL, QUERY, ExportRecord, read_record
from headrace.models.columns import FeatureColumns, matrix_of
from headrace.models.predictor import ONLY_TASK
from headrace.models.retrieval import query_vectors, row_item_vectors
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema, Kind
from headrace.storage import Location

Answers = Mapping[str, NDArray[np.float32]]
#: By graph, what it gives.
GraphAnswers = Mapping[str, Answers]


def by_model(model: ShardedModel, case: ExportCase, inputs: Batch) -> GraphAnswers:
    """Return the model's own answers for a batch, by graph."""
    batch = tensors(case.schema, inputs)
    with torch.inference_mode():
        outputs = model.outputs_of(*batch)
        tasks = model.tasks
        by_task = {name: tasks.value(name, outputs[name]).numpy() for name in tasks.specs}
        answers = {MODEL: by_task or {ONLY_TASK: model.value(outputs["logits"]).numpy()}}
    if QUERY in ExportedNetwork(model).graphs:
        answers[QUERY] = {QUERY_VECTOR: query_vectors(model, *batch).numpy()}
        answers[ITEM] = {ITEM_VECTOR: row_item_vectors(model, *batch).numpy()}
    return answers


@contextmanager
def rounded(model: ShardedModel, precision: str) -> Iterator[None]:
    """Give a model the numbers that the files have, while the block runs.

    (LightGCN's are rounded behind the propagation.)
    """
    tables = list(model.embeddings.weights)
    tables += [] if model.dynamic is None else [t.weight for t in model.dynamic.tables]
    network = model.network
    propagated = getattr(network, "_propagated", None)
    if propagated is not None:
        rows = [x / network.args.temperature if not i else x for i, x in enumerate(propagated)]
        users, items = (x if precision == "fp32" else decode(encode(x, DTYPES[precision])) for x in rows)
        network._propagated = users * network.args.temperature, items
    saved = [rows.clone() for rows in tables]
    if propagated is None:
        for rows in tables:
            rows.copy_(decode(encode(rows, DTYPES[precision])))
    try:
        yield
    finally:
        for rows, original in zip(tables, saved, strict=True):
            rows.copy_(original)
        if propagated is not None:
            network._propagated = propagated


def inputs_of(schema: DatasetSchema, columns: FeatureColumns) -> Batch:
    """Return the inputs of an export, from features by name as predictors have them."""
    inputs: dict[str, NDArray[Any]] = {}
    for f in (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL)):
        values = matrix_of(columns, f)
        if f.kind is Kind.CONTINUOUS:
            inputs[f.name] = values.astype(np.float32)
        else:
            inputs[f.name] = (values if f.is_list else values.reshape(-1)).astype(np.int64)
    return inputs


def by_onnxruntime(folder: Location, inputs: Batch) -> GraphAnswers:
    """Return the answers of an ONNX export, on one thread."""
    record = read_record(folder)
    return {name: _session(folder, graph.file, inputs) for name, graph in record.graphs.items()}


def _session(folder: Location, file: str, inputs: Batch) -> Answers:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession((folder / file).local_path(), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    feed = {x.name: inputs[x.name] for x in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


def by_torch_program(folder: Location, inputs: Batch) -> GraphAnswers:
    """Return the answers of a torch export."""
    record, answers = read_record(folder), {}
    for name, graph in record.graphs.items():
        program = torch.export.load((folder / graph.file).local_path()).module()
        arguments = [torch.from_numpy(inputs[x.name]) for x in graph.inputs]
        results = program(*arguments, *_mapped(folder, record, name))
        answers[name] = {o.name: x.detach().numpy() for o, x in zip(graph.outputs, results, strict=True)}
    return answers


def _mapped(folder: Location, record: ExportRecord, graph: str) -> list[Any]:
    tables = record.graphs[graph].tables
    return [
        torch.from_numpy(np.memmap((folder / t.file).local_path(), t.dtype, "c", t.offset, t.shape)) for t in tables
    ]


#: Differences of numbers below are relative to this: sums that cancel have fewer digits.
_SMALL = 0.1


def difference(answers: GraphAnswers, expected: GraphAnswers) -> float:
    """Return the largest difference, relative to what is expected, or to 0.1 where that is smaller."""
    assert {n: list(x) for n, x in answers.items()} == {n: list(x) for n, x in expected.items()}
    pairs = [(answers[g][n], x) for g, outputs in expected.items() for n, x in outputs.items()]
    return max(float(np.max(np.abs(a - b) / np.maximum(np.abs(b), _SMALL), initial=0)) for a, b in pairs)
