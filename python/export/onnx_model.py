"""A saved model as ONNX graphs: the lookups in its tables' files, then the network.

    model.onnx          a row's predictions; the network's weights are in it
    query.onnx          of a model in retrieval form: the vector of what a row asks for
    item.onnx           and that of the row's item
    items.npy           the vectors of all items by code, where they follow from the code
    table-N-P.bin       rows of a table, named by the graphs as external data
    keys-N.bin          of a table of raw ids, which row an id has
    export.json         the record: `headrace.export.record`

Inputs, by the names of the features: continuous float32 [rows, columns]; categorical int64 [rows], a code of the
fitted vocabulary (0 null, 1 not known) or a raw id; a list int64 [rows, length], any length of one batch, 0 where there
is no value. Outputs of `model`, by the names of the tasks (`label` of a model of one): float32 [rows].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import onnx

from headrace.errors import UserError
from headrace.export import record
from headrace.export.lookup_nodes import LookupNodes
from headrace.export.model_record import finish, tables_of
from headrace.export.network import RESERVED, ROWS, ExportedNetwork
from headrace.export.table_files import FILE_BYTES, Precision, total_bytes, write_tables
from headrace.export.traced import traced_onnx
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema, Kind
from headrace.storage import Location

#: How names begin that lookups and tables have in a graph.
_RESERVED = (RESERVED, "table-", "keys-")
_DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}


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
        UserError: torch cannot trace the model's class; a feature has a name that a graph has for itself. Nothing is
            written then.
    """
    exported = ExportedNetwork(model)
    whole = traced_onnx(exported)
    _check_names(model.schema, whole.graph)
    of_rows = {a.name for a in exported.arguments if a.shape[0] == ROWS}
    parts = {name: _part(whole, exported.outputs(name), of_rows) for name in exported.graphs}
    used = {name: {x.name for x in part.graph.input} for name, part in parts.items()}
    tables = write_tables(exported, tables_of(exported, used.values()), folder, precision, file_bytes)
    graphs = {}
    for name, part in parts.items():
        nodes = LookupNodes(exported, tables, used[name])
        _put_before(part.graph, nodes)
        file = f"{name}.onnx"
        (folder / file).put_bytes(part.SerializeToString())
        onnx.checker.check_model((folder / file).local_path())
        inputs, outputs = (_tensors(x) for x in (part.graph.input, part.graph.output))
        graphs[name] = record.Graph(file=file, inputs=inputs, outputs=outputs, files=tuple(nodes.files))
    finish(exported, card, folder, "onnx", precision, graphs)
    return total_bytes(tables)


def _check_names(schema: DatasetSchema, graph: Any) -> None:
    """Names are unique in a graph: its inputs are the features'."""
    own = {name for node in graph.node for name in node.output} | {x.name for x in graph.initializer}
    own |= {x.name for x in graph.output}
    names = [f.name for kind in (Kind.CONTINUOUS, Kind.CATEGORICAL) for f in schema.of(kind)]
    if taken := [name for name in names if name in own or name.startswith(_RESERVED)]:
        raise UserError(
            f"the model cannot be exported as ONNX: its graph has these names for itself: {', '.join(taken)}; give "
            f"these features other names"
        )


def _part(whole: Any, outputs: Collection[str], of_rows: Collection[str]) -> Any:
    """Return the submodel that computes some of a model's outputs.

    Args:
        whole: a model.
        outputs: their names.
        of_rows: names of inputs whose first dimension is that of the batch's rows.
    """
    found = onnx.ModelProto()
    found.CopyFrom(whole)
    graph = found.graph
    nodes, needed = _needed(graph, outputs)
    # torch asks any input for the number of rows, such as one that is not read otherwise: ask one that is.
    read = {name for node in nodes if node.op_type != "Shape" for name in _read_by(node)}
    counted = next((x.name for x in graph.input if x.name in of_rows and x.name in read), None)
    for node in nodes:
        is_rows = {(a.name, a.i) for a in node.attribute} == {("start", 0), ("end", 1)}
        if counted and node.op_type == "Shape" and is_rows and node.input[0] in set(of_rows) - read:
            node.input[0] = counted
    nodes, needed = _needed(graph, outputs)
    for field, kept in (
        (graph.node, nodes),
        (graph.initializer, [x for x in graph.initializer if x.name in needed]),
        (graph.input, [x for x in graph.input if x.name in needed]),
        (graph.output, [x for x in graph.output if x.name in outputs]),
        (graph.value_info, []),
    ):
        copies = [type(x).FromString(x.SerializeToString()) for x in kept]
        del field[:]
        field.extend(copies)
    return found


def _needed(graph: Any, outputs: Collection[str]) -> tuple[list[Any], set[str]]:
    """Return the nodes that outputs need, in order, and all names that these read."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(_read_by(node))
    return nodes[::-1], needed


def _read_by(node: Any) -> Sequence[str]:
    """Names that a node reads, those of graphs within it too."""
    found = list(node.input)
    for attribute in node.attribute:
        inner = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        found += [name for graph in inner for n in graph.node for name in _read_by(n)]
    return found


def _put_before(graph: Any, lookups: LookupNodes) -> None:
    """Make the features the inputs of a graph that asks for what lookups give."""
    del graph.input[:]
    graph.input.extend(lookups.inputs)
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*lookups.nodes, *own])
    graph.initializer.extend(lookups.initializers)


def _tensors(values: Any) -> tuple[record.Tensor, ...]:
    found = []
    for x in values:
        of = x.type.tensor_type
        sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in of.shape.dim]
        shape = (ROWS, *sizes[1:])  # torch has a name of its own for it
        found.append(record.Tensor(name=x.name, dtype=_DTYPES[of.elem_type], shape=shape))
    return tuple(found)
