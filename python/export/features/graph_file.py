"""A fitted workflow as an ONNX graph, from raw columns to the inputs of a model's graph.

Inputs: see headrace.export.features.columns. The graph has an output `<feature>.feature` for each feature: codes and
raw ids int64 [rows], lists of them int64 [rows, length], numbers float32 [rows, columns]. It computes in float64 and
rounds once, as headrace's own kernels do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from headrace.config.schema import Feature, Kind
from headrace.errors import UserError
from headrace.export.features.codes import MOST_INTEGERS
from headrace.export.features.columns import FEATURE, ROWS, RawColumn, RawTensor, made_of, raw_columns
from headrace.export.features.graph import (
    BOOL,
    DOUBLE,
    FLOAT,
    INT64,
    IR_VERSION,
    ML,
    ML_OPSET,
    OPSET,
    STRING,
    GraphWriter,
    Value,
    doubles,
)
from headrace.export.features.operators import lacks, written
from headrace.export.record import ExportedGraph, GraphTensor, file_sizes, read_record, write_record
from headrace.features.types import ValueType
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import BoundChain
from headrace.storage import Location

#: Prefixes of the names that the graph reserves.
_RESERVED = ("node.", "constant.", "table.")
_TYPES = {"object": STRING, "int64": INT64, "bool": BOOL, "float32": FLOAT, "float64": DOUBLE}


@dataclass(frozen=True)
class FeaturesGraph:
    """A written graph: its input columns, its features and its files."""

    columns: tuple[RawColumn, ...]
    features: tuple[Feature, ...]
    files: tuple[str, ...]


def faults(workflow: FittedWorkflow, only: Collection[str] | None = None) -> list[str]:
    """List the operators that ONNX lacks, each with its key in the spec; a workflow without any can be a graph."""
    messages = []
    for i, chain in _chains(workflow, only):
        decimal = [c for c in chain.columns if workflow.workflow.input_type(c).element == "decimal"]
        if decimal:
            messages.append(f"features.workflow[{i}]: {', '.join(decimal)}: ONNX has no decimals")
        for j, step in chain.named_steps():
            gap = lacks(step, workflow.vocabularies.__getitem__)
            if gap is not None:
                messages.append(f"features.workflow[{i}].ops[{j}] ({step.op.reference()}): {gap}")
    return messages


def write_features(
    workflow: FittedWorkflow,
    folder: Location,
    file: str = "features.onnx",
    only: Collection[str] | None = None,
    most_integers: int = MOST_INTEGERS,
) -> FeaturesGraph:
    """Write the graph into a folder, large tables as files beside it.

    Args:
        workflow: workflow with its vocabularies in memory.
        folder: folder of the files.
        file: name of the graph's file.
        only: names of features; None: all.
        most_integers: a vocabulary with more integers becomes a file.

    Raises:
        UserError: ONNX lacks an operator (`faults`), or two tensors would have one name.
    """
    if gaps := faults(workflow, only):
        raise UserError("the features cannot be exported as ONNX: " + "; ".join(gaps))
    chains = _chains(workflow, only)
    features = tuple(f for f in workflow.features if only is None or f.name in only)
    columns = raw_columns(workflow.workflow, made_of(features))
    _check_names(columns, features)
    graph = GraphWriter(folder)
    entered = {column.name: _entered(graph, column) for column in columns}
    for i, chain in chains:
        # Columns that only other features of the chain read; `prune` removes their nodes.
        types = {name: workflow.workflow.input_type(name) for name in chain.columns if name not in entered}
        values = {name: entered[name] if name in entered else _absent(graph, types[name]) for name in chain.columns}
        for j, (step, state) in enumerate(zip(chain.steps, workflow.states[i], strict=True)):
            table = partial(_table, workflow, f"{i}.{j}")
            lookup = workflow.vocabularies.__getitem__
            values = written(graph, step, values, state=state, lookup=lookup, table=table, most_integers=most_integers)
        for feature in features:
            if feature.name in chain.outputs:
                _finished(graph, values[feature.name], chain.outputs[feature.name], feature.name)
    graph.prune([f"{f.name}{FEATURE}" for f in features])
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "features",
            [_input(t) for column in columns for t in column.tensors],
            [_output(f) for f in features],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(ML, ML_OPSET)],
        ir_version=IR_VERSION,
        producer_name="headrace",
    )
    (folder / file).put_bytes(model.SerializeToString())
    onnx.checker.check_model(str((folder / file).local_path()))
    return FeaturesGraph(columns, features, tuple(graph.files))


def _chains(workflow: FittedWorkflow, only: Collection[str] | None) -> Sequence[tuple[int, BoundChain]]:
    names = {f.name for f in workflow.features if only is None or f.name in only}
    return [(i, chain) for i, chain in enumerate(workflow.workflow.chains) if names & set(chain.outputs)]


def _table(workflow: FittedWorkflow, scope: str, name: str) -> Any:
    return workflow.tables[f"{scope}.{name}"]


def _check_names(columns: Sequence[RawColumn], features: Sequence[Feature]) -> None:
    inputs = [t.name for column in columns for t in column.tensors]
    taken = [n for n in inputs if n.startswith(_RESERVED)]
    taken += sorted({f"{f.name}{FEATURE}" for f in features} & set(inputs))
    if taken:
        raise UserError(f"the features' graph has these names for itself: {', '.join(taken)}; rename these columns")


def _entered(graph: GraphWriter, column: RawColumn) -> Value:
    """Return a column as operators see it: reals as float64, NaN where they are missing."""
    tensors = {t.name.removeprefix(column.name): t.name for t in column.tensors[1:]}
    missing, length = tensors.get(".missing"), tensors.get(".length")
    if column.has_nan:
        name = column.name if column.dtype == "float64" else graph.cast(column.name, DOUBLE)
        return Value(name, "real", None, length)
    kind = {"object": "text", "bool": "bool"}.get(column.dtype, "int")
    return Value(column.name, kind, missing, length)


def _absent(graph: GraphWriter, type_: ValueType) -> Value:
    """Return a single missing value in place of a column that the graph does not read."""
    shape = (1, 1) if type_.is_list else (1,)
    length = graph.constant([1], np.int64) if type_.is_list else None
    if type_.element in ("float", "double"):
        return Value(graph.constant(np.full(shape, np.nan)), "real", None, length)
    kind, value, dtype = {"string": ("text", "", object), "boolean": ("bool", False, np.bool_)}.get(
        type_.element, ("int", 0, np.int64)
    )
    missing = graph.constant(np.ones(shape, np.bool_))
    return Value(graph.constant(np.full(shape, value, dtype)), kind, missing, length)


def _finished(graph: GraphWriter, x: Value, end: ValueType, name: str) -> None:
    """Add a feature's output; numbers that are missing, or not finite as float32, become 0."""
    output = [f"{name}{FEATURE}"]
    if end.is_categorical:
        graph.add("Identity", x.name, outputs=output)
        return
    single = graph.cast(doubles(graph, x), FLOAT)
    finite = graph.add("Less", graph.add("Abs", single), graph.constant(np.inf, np.float32))
    if end.is_list:
        graph.add("Where", finite, single, graph.constant(0, np.float32), outputs=output)
        return
    numbers = graph.select(finite, single, graph.constant(0, np.float32))
    graph.add("Unsqueeze", numbers, graph.constant([1], np.int64), outputs=output)


def _input(tensor: Any) -> Any:
    return helper.make_tensor_value_info(tensor.name, _TYPES[tensor.dtype], list(tensor.shape))


def _output(feature: Feature) -> Any:
    codes = feature.cardinality is not None or feature.dynamic
    shape = [ROWS] if codes and not feature.is_list else [ROWS, feature.length]
    return helper.make_tensor_value_info(f"{feature.name}{FEATURE}", TensorProto.INT64 if codes else FLOAT, shape)


#: The graph's name in the record.
FEATURES = "features"
_FILE = "features.onnx"
_ROWS = "rows"


def add_features(folder: Location, workflow: FittedWorkflow) -> list[str]:
    """Write the graph of the features that an export's graphs read, and name it in the export's record.

    Args:
        folder: folder of the export, which is not complete yet.
        workflow: workflow of the saved model.

    Returns:
        the operators that ONNX lacks; if there are any, nothing is written.
    """
    record = read_record(folder)
    requested = {tensor.name for graph in record.graphs.values() for tensor in graph.inputs}
    if gaps := faults(workflow, requested):
        return gaps
    features_graph = write_features(workflow, folder, _FILE, requested)
    graphs = {**record.graphs, FEATURES: _graph(features_graph)}
    write_record(folder, record.model_copy(update={"graphs": graphs, "files": file_sizes(folder)}))
    return []


def _graph(features_graph: FeaturesGraph) -> ExportedGraph:
    inputs = tuple(_record_input(tensor) for column in features_graph.columns for tensor in column.tensors)
    return ExportedGraph(
        file=_FILE,
        inputs=inputs,
        outputs=tuple(map(_record_output, features_graph.features)),
        files=features_graph.files,
    )


def _record_input(tensor: RawTensor) -> GraphTensor:
    dtype = "string" if tensor.dtype == "object" else tensor.dtype
    return GraphTensor.model_validate({"name": tensor.name, "dtype": dtype, "shape": tensor.shape})


def _record_output(feature: Feature) -> GraphTensor:
    codes = feature.kind is Kind.CATEGORICAL
    shape = (_ROWS,) if codes and not feature.is_list else (_ROWS, feature.length)
    return GraphTensor(name=f"{feature.name}{FEATURE}", dtype="int64" if codes else "float32", shape=shape)
