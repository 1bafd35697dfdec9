"""A saved model as one ONNX graph: the lookups in its tables' files, then the network.

    model.onnx          the graph; weights of the network are in it
    table-N-P.bin       rows of a table, named by the graph as external data
    export.json         the features that the graph asks for, what it gives, and from which model it is

Inputs, by the names of the features: continuous float32 [rows, columns]; categorical int64 [rows], a code of the
fitted vocabulary (0 null, 1 not known); a list int64 [rows, length], any length of one batch, 0 where there is no
value. Outputs, by the names of the tasks (`label` of a model of one): float32 [rows].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from headrace import __version__
from headrace.errors import UserError
from headrace.export.dense_graph import CONTINUOUS, ROWS, VECTORS, export_dense
from headrace.export.table_files import Block, Precision, TablePart, total_bytes, write_tables
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.models.tables import lookups_of
from headrace.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.storage import Location

GRAPH, RECORD = "model.onnx", "export.json"
#: How names begin that lookups and tables have in the graph.
_RESERVED = ("lookup.", "table-")
#: Bytes of a table's file at most.
FILE_BYTES = 2 << 30
_TYPES = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.uint8: TensorProto.UINT8}


def faults(model: ShardedModel) -> list[str]:
    """What of a model cannot be exported, each in a sentence; without any it can."""
    found = []
    if lookups_of(model.network) is not None:
        found.append(f"the class '{model.config.kind}' looks up by itself (`lookups`): sequences, pairs of vectors")
    raw = [f.name for f in model.schema.of(Kind.CATEGORICAL) if f.dynamic]
    if raw:
        found.append(f"features of raw ids, whose tables are no matrices: {', '.join(raw)}")
    return found


def check_exportable(model: ShardedModel) -> None:
    """Raise UserError where a model cannot be exported: names all that is in the way."""
    if found := faults(model):
        raise UserError("the model cannot be exported as ONNX: " + "; ".join(found))


def write_onnx(
    model: ShardedModel, card: ModelCard, folder: Location, precision: Precision, file_bytes: int = FILE_BYTES
) -> int:
    """Write an export of a model into an empty folder.

    Args:
        model: on one rank, in evaluation mode.
        card: its record.
        folder: to fill.
        precision: of the tables' rows; the network computes in float32.
        file_bytes: of a table's file at most.

    Returns:
        bytes of the tables' files.

    Raises:
        UserError: see `check_exportable`, `export_dense`; a feature has a name that the graph has for itself.
    """
    check_exportable(model)
    made = export_dense(model)
    _check_names(model.schema, made.graph)
    tables = write_tables(model, folder, precision, file_bytes)
    _put_lookups_before(made.graph, model, tables)
    (folder / GRAPH).put_bytes(made.SerializeToString())
    onnx.checker.check_model(str(folder / GRAPH))
    (folder / RECORD).put_text(json.dumps(_record(card, made.graph, precision), indent=1) + "\n")
    return total_bytes(tables)


def _check_names(schema: DatasetSchema, graph: Any) -> None:
    """Names are unique in a graph: its inputs are the features'."""
    own = {name for node in graph.node for name in node.output} | {x.name for x in graph.initializer}
    own |= {CONTINUOUS, VECTORS, *(x.name for x in graph.output)}
    names = [f.name for kind in (Kind.CONTINUOUS, Kind.CATEGORICAL) for f in schema.of(kind)]
    if taken := [name for name in names if name in own or name.startswith(_RESERVED)]:
        raise UserError(
            f"the model cannot be exported as ONNX: its graph has these names for itself: {', '.join(taken)}; give "
            f"these features other names"
        )


def _record(card: ModelCard, graph: Any, precision: Precision) -> dict[str, Any]:
    names = {"class": card.kind, "pipeline": card.pipeline, "ds": card.ds, "key": card.key}
    schema = card.dataset_schema.model_dump(mode="json")
    outputs = [x.name for x in graph.output]
    return {"format": "onnx", **names, "tables": precision, "outputs": outputs, "schema": schema, "code": __version__}


class _Nodes:
    """Nodes that come before a graph's own, and the matrices that they read."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._matrices: set[str] = set()

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"lookup.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any) -> str:
        name = f"lookup.constant.{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def matrix(self, block: Block) -> str:
        if block.name not in self._matrices:
            self._matrices.add(block.name)
            tensor = TensorProto(name=block.name, data_type=_TYPES[block.dtype], dims=[block.rows, block.columns])
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": block.file, "offset": block.offset, "length": block.bytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            self.initializers.append(tensor)
        return block.name


def _put_lookups_before(graph: Any, model: ShardedModel, tables: Mapping[str, Sequence[TablePart]]) -> None:
    """Make the features the inputs of a graph that asks for `continuous` and `vectors`."""
    asked = [x.name for x in graph.input]
    nodes, inputs = _Nodes(), []
    schema: DatasetSchema = model.schema
    columns = []
    for f in schema.of(Kind.CONTINUOUS):
        inputs.append(helper.make_tensor_value_info(f.name, TensorProto.FLOAT, [ROWS, f.length]))
        columns.append(f.name)
    vectors = []
    for f in schema.of(Kind.CATEGORICAL):
        shape = [ROWS, f"{f.name}.length"] if f.is_list else [ROWS]
        inputs.append(helper.make_tensor_value_info(f.name, TensorProto.INT64, shape))
        rows = _rows_of(nodes, f.name, tables[f.vocabulary or f.name])
        vector = _pooled(nodes, f, rows, model.config.pooling) if f.is_list else rows
        vectors.append(nodes.add("Unsqueeze", [vector, nodes.constant(np.array([1]))]))
    for name, parts, axis in ((CONTINUOUS, columns, 1), (VECTORS, vectors, 1)):
        if name in asked and parts:
            nodes.nodes.append(helper.make_node("Concat", parts, [name], name=name, axis=axis))
    del graph.input[:]
    graph.input.extend(inputs)
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes.nodes, *own])
    graph.initializer.extend(nodes.initializers)


def _rows_of(nodes: _Nodes, ids: str, parts: Sequence[TablePart]) -> str:
    """The rows of ids (any shape) as float32. An id behind the last row is an error of the runtime."""
    found = None
    for number, part in enumerate(parts):
        inside, local = None, ids
        if len(parts) > 1:
            local = nodes.add("Sub", [ids, nodes.constant(np.int64(part.start))])
            inside = nodes.add("GreaterOrEqual", [local, nodes.constant(np.int64(0))])
            if number < len(parts) - 1:
                below = nodes.add("Less", [local, nodes.constant(np.int64(part.matrix.rows))])
                inside = nodes.add("And", [inside, below])
            local = nodes.add("Where", [inside, local, nodes.constant(np.int64(0))])
        rows = nodes.add("Gather", [nodes.matrix(part.matrix), local], axis=0)
        if part.matrix.dtype is not torch.float32:
            rows = nodes.add("Cast", [rows], to=TensorProto.FLOAT)
        if part.grid is not None:
            grid = nodes.add("Gather", [nodes.matrix(part.grid), local], axis=0)
            scale, offset = (nodes.add("Gather", [grid, nodes.constant(np.array([i]))], axis=-1) for i in (0, 1))
            rows = nodes.add("Add", [nodes.add("Mul", [rows, scale]), offset])
        if inside is not None:
            mask = nodes.add("Unsqueeze", [inside, nodes.constant(np.array([-1]))])
            rows = nodes.add("Where", [mask, rows, nodes.constant(np.float32(0))])
        found = rows if found is None else nodes.add("Add", [found, rows])
    assert found is not None
    return found


def _pooled(nodes: _Nodes, feature: Feature, rows: str, pooling: str) -> str:
    """One vector [B, D] of the rows [B, L, D] of a list, of which those of nulls do not count; zeros of none."""
    axis = nodes.constant(np.array([1]))
    there = nodes.add("Not", [nodes.add("Equal", [feature.name, nodes.constant(np.int64(NULL_CODE))])])
    mask = nodes.add("Unsqueeze", [there, nodes.constant(np.array([2]))])
    counts = nodes.add("Cast", [there], to=TensorProto.FLOAT)
    count = nodes.add("ReduceSum", [counts, axis], keepdims=1)  # [B, 1]
    zero = nodes.constant(np.float32(0))
    if pooling == "max":
        lowest = nodes.constant(np.float32(-np.inf))
        most = nodes.add("ReduceMax", [nodes.add("Where", [mask, rows, lowest]), axis], keepdims=0)
        return nodes.add("Where", [nodes.add("Greater", [count, zero]), most, zero])
    total = nodes.add("ReduceSum", [nodes.add("Where", [mask, rows, zero]), axis], keepdims=0)
    if pooling == "sum":
        return total
    return nodes.add("Div", [total, nodes.add("Max", [count, nodes.constant(np.float32(1))])])
