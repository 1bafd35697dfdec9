"""A saved model as ONNX graphs: the lookups in its tables' files, then the network.

    model.onnx          predictions of rows; the network's weights are in it
    query.onnx          for a model in retrieval form: the vector of a row's query
    item.onnx           for a model in retrieval form: the vector of a row's item
    items.npy           the vectors of all items by code, if they depend only on the code
    table-N-P.bin       rows of a table, named by the graphs as external data
    keys-N.bin          for a table of raw ids: the row of each id
    export.json         the record: `headrace.export.record`

Inputs have the names of the features. Continuous: float32 [rows, columns]. Categorical: int64 [rows], a code of the
fitted vocabulary (0 null, 1 unknown) or a raw id. List: int64 [rows, length], with one length for a batch and 0 for no
value. Outputs of `model` have the names of the tasks (`label` for a model of one): float32 [rows].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.export import record
from headrace.export.files import (
    FILE_BYTES,
    FileBlock,
    IdFiles,
    Precision,
    TableFiles,
    TablePart,
    tables_read,
    total_bytes,
    write_items_and_record,
    write_tables,
)
from headrace.export.network import (
    CONTINUOUS,
    RESERVED,
    ROWS,
    ExportedNetwork,
    ids_name,
    is_sequence,
    lengths_name,
    traced_onnx,
    vectors_name,
)
from headrace.models.lookups import EmbeddingLookup
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location

#: Prefixes of the names that lookups and tables have in a graph.
_RESERVED = (RESERVED, "table-", "keys-")
_DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}
_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.uint8: TensorProto.UINT8,
    torch.int64: TensorProto.INT64,
}


def write_onnx(
    model: ShardedModel, card: ModelCard, folder: Location, precision: Precision, file_bytes: int = FILE_BYTES
) -> int:
    """Write an export of a model into an empty folder.

    Args:
        model: the model on one rank, in evaluation mode.
        card: the model's record.
        folder: the empty folder.
        precision: number format of the tables' rows; the network computes in float32.
        file_bytes: largest file of a table.

    Returns:
        bytes of the tables' files.

    Raises:
        UserError: torch cannot trace the model's class, or a feature has a name that graphs reserve. Nothing is written
            then.
    """
    exported = ExportedNetwork(model)
    traced_model = traced_onnx(exported)
    _check_names(model.schema, traced_model.graph)
    batch_inputs = {a.name for a in exported.arguments if a.shape[0] == ROWS}
    parts = {name: _part(traced_model, exported.outputs(name), batch_inputs) for name in exported.graphs}
    used = {name: {x.name for x in part.graph.input} for name, part in parts.items()}
    tables = write_tables(exported, tables_read(exported, used.values()), folder, precision, file_bytes)
    graphs = {}
    for name, part in parts.items():
        nodes = LookupNodes(exported, tables, used[name])
        _put_before(part.graph, nodes)
        file = f"{name}.onnx"
        (folder / file).put_bytes(part.SerializeToString())
        onnx.checker.check_model((folder / file).local_path())
        inputs, outputs = (_tensors(x) for x in (part.graph.input, part.graph.output))
        graphs[name] = record.ExportedGraph(file=file, inputs=inputs, outputs=outputs, files=tuple(nodes.files))
    write_items_and_record(exported, card, folder, "onnx", precision, graphs)
    return total_bytes(tables)


def _check_names(schema: DatasetSchema, graph: Any) -> None:
    """Check that no feature has a name that the graph uses: names are unique in a graph."""
    internal_names = {name for node in graph.node for name in node.output} | {x.name for x in graph.initializer}
    internal_names |= {x.name for x in graph.output}
    names = [f.name for kind in (Kind.CONTINUOUS, Kind.CATEGORICAL) for f in schema.of(kind)]
    if taken := [name for name in names if name in internal_names or name.startswith(_RESERVED)]:
        raise UserError(
            f"the model cannot be exported as ONNX: its graph has these names for itself: {', '.join(taken)}; give "
            f"these features other names"
        )


def _part(traced_model: Any, outputs: Collection[str], batch_inputs: Collection[str]) -> Any:
    """Return the submodel that computes some of a model's outputs.

    Args:
        traced_model: the model.
        outputs: names of the outputs.
        batch_inputs: names of inputs whose first dimension is the batch's rows.
    """
    part = onnx.ModelProto()
    part.CopyFrom(traced_model)
    graph = part.graph
    nodes, needed = _needed(graph, outputs)
    # torch may take the number of rows from an input that this graph does not read; take it from one that it reads.
    read = {name for node in nodes if node.op_type != "Shape" for name in _read_by(node)}
    counted_input = next((x.name for x in graph.input if x.name in batch_inputs and x.name in read), None)
    for node in nodes:
        is_rows = {(a.name, a.i) for a in node.attribute} == {("start", 0), ("end", 1)}
        if counted_input and node.op_type == "Shape" and is_rows and node.input[0] in set(batch_inputs) - read:
            node.input[0] = counted_input
    nodes, needed = _needed(graph, outputs)
    for field, entries in (
        (graph.node, nodes),
        (graph.initializer, [x for x in graph.initializer if x.name in needed]),
        (graph.input, [x for x in graph.input if x.name in needed]),
        (graph.output, [x for x in graph.output if x.name in outputs]),
        (graph.value_info, []),
    ):
        copies = [type(x).FromString(x.SerializeToString()) for x in entries]
        del field[:]
        field.extend(copies)
    return part


def _needed(graph: Any, outputs: Collection[str]) -> tuple[list[Any], set[str]]:
    """Return the nodes that outputs need, in order, and all names that these read."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(_read_by(node))
    return nodes[::-1], needed


def _read_by(node: Any) -> Sequence[str]:
    """Return the names that a node reads, including those of graphs within it."""
    names = list(node.input)
    for attribute in node.attribute:
        inner = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        names += [name for graph in inner for n in graph.node for name in _read_by(n)]
    return names


def _put_before(graph: Any, lookups: LookupNodes) -> None:
    """Put lookups before a graph that takes their results, so that the features become its inputs."""
    del graph.input[:]
    graph.input.extend(lookups.inputs)
    network_nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*lookups.nodes, *network_nodes])
    graph.initializer.extend(lookups.initializers)


def _tensors(values: Any) -> tuple[record.GraphTensor, ...]:
    tensors = []
    for x in values:
        tensor_type = x.type.tensor_type
        sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor_type.shape.dim]
        shape = (ROWS, *sizes[1:])  # torch gives the batch dimension a name of its own
        tensors.append(record.GraphTensor(name=x.name, dtype=_DTYPES[tensor_type.elem_type], shape=shape))
    return tuple(tensors)


class LookupNodes:
    """Nodes of the lookups before a network's own nodes, with their tensors and inputs.

    Args:
        exported: the network.
        tables: files of its tables.
        used: names of `ExportedNetwork.arguments` that the network's graph reads.
    """

    def __init__(self, exported: ExportedNetwork, tables: Mapping[str, TableFiles], used: Collection[str]) -> None:
        self._exported, self._tables, self._used = exported, tables, set(used)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        #: Files of the tables that the graph reads, in order.
        self.files: dict[str, None] = {}
        self._blocks: set[str] = set()
        self._add_continuous()
        for f in exported.features.values():
            self._add_feature(f, [w for w in exported.lookups if w.feature == f.name and vectors_name(w.name) in used])

    def _add_continuous(self) -> None:
        if CONTINUOUS not in self._used:
            return
        columns = []
        for f in self._exported.model.schema.of(Kind.CONTINUOUS):
            self.inputs.append(helper.make_tensor_value_info(f.name, TensorProto.FLOAT, [ROWS, f.length]))
            columns.append(f.name)
        self._named("Concat", columns, CONTINUOUS, axis=1)

    def _add_feature(self, f: Feature, lookups: Sequence[EmbeddingLookup]) -> None:
        for w in lookups:
            if w.ids == "all":
                self._named("Identity", [self._all_rows(w, f)], vectors_name(w.name))
        batch_lookups = [w for w in lookups if w.ids == "batch"]
        wants_ids, wants_lengths = ids_name(f.name) in self._used, lengths_name(f.name) in self._used
        if not batch_lookups and not wants_ids and not wants_lengths:
            return
        shape = [ROWS, f"{f.name}.length"] if f.is_list else [ROWS]
        self.inputs.append(helper.make_tensor_value_info(f.name, TensorProto.INT64, shape))
        if not f.is_list:
            if wants_ids:
                self._named("Identity", [f.name], ids_name(f.name))
            for w in batch_lookups:
                self._named("Identity", [self._rows(f.name, w)], vectors_name(w.name))
            return
        not_null = self._add("Not", [self._add("Equal", [f.name, self._constant(np.int64(NULL_CODE))])])
        if wants_lengths:
            ones = self._add("Cast", [not_null], to=TensorProto.INT64)
            axis = self._constant(np.array([1]))
            self._named("ReduceSum", [ones, axis], lengths_name(f.name), keepdims=0)
        if wants_ids or any(is_sequence(w) for w in batch_lookups):
            flat = self._constant(np.array([-1]))
            self._named(
                "Compress", [self._add("Reshape", [x, flat]) for x in (f.name, not_null)], ids_name(f.name), axis=0
            )
        for w in batch_lookups:
            if is_sequence(w):
                vectors = self._rows(ids_name(f.name), w)
            else:
                vectors = self._pooled(not_null, self._rows(f.name, w), w.pooling)
            self._named("Identity", [vectors], vectors_name(w.name))

    def _all_rows(self, w: EmbeddingLookup, f: Feature) -> str:
        """Add the rows of all codes as float32 [cardinality, D]; return the tensor's name."""
        parts, begin = self._tables[self._exported.table_of(w)].parts, self._constant(np.array([0]))
        decoded_parts = [self._decoded(part, None) for part in parts]
        table = self._add("Concat", decoded_parts, axis=0) if len(decoded_parts) > 1 else decoded_parts[0]
        return self._add("Slice", [table, begin, self._constant(np.array([f.cardinality or 0])), begin])

    def _rows(self, ids: str, w: EmbeddingLookup) -> str:
        """Add the rows of ids (any shape) as float32 [..., D].

        A code beyond the last row is an error of the runtime.
        """
        table = self._tables[self._exported.table_of(w)]
        return (
            self._rows_of_codes(ids, table.parts)
            if table.ids is None
            else self._rows_of_raw_ids(ids, table.ids, table.parts)
        )

    def _rows_of_codes(self, codes: str, parts: Sequence[TablePart]) -> str:
        combined = None
        for number, part in enumerate(parts):
            inside, local = None, codes
            if len(parts) > 1:
                local = self._add("Sub", [codes, self._constant(np.int64(part.start))])
                inside = self._add("GreaterOrEqual", [local, self._constant(np.int64(0))])
                if number < len(parts) - 1:
                    below = self._add("Less", [local, self._constant(np.int64(part.rows))])
                    inside = self._add("And", [inside, below])
                local = self._add("Where", [inside, local, self._constant(np.int64(0))])
            rows = self._decoded(part, local)
            if inside is not None:
                rows = self._add("Where", [self._last_axis(inside), rows, self._constant(np.float32(0))])
            combined = rows if combined is None else self._add("Add", [combined, rows])
        assert combined is not None
        return combined

    def _rows_of_raw_ids(self, ids: str, id_files: IdFiles, parts: Sequence[TablePart]) -> str:
        """Add the rows of raw ids; `headrace.export.files` describes the search in their files."""
        bucket = self._add("Mod", [ids, self._constant(np.int64(id_files.starts.shape[0]))])
        first = self._last_axis(self._add("Gather", [self._block(id_files.starts), bucket], axis=0))
        positions = self._add("Add", [first, self._constant(np.arange(id_files.largest_bucket))])
        positions = self._add("Min", [positions, self._constant(np.int64(id_files.keys.shape[0] - 1))])
        keys = self._add("Gather", [self._block(id_files.keys), positions], axis=0)
        hit = self._add("Equal", [keys, self._last_axis(ids)])
        rows = self._add("Where", [hit, positions, self._constant(np.int64(-1))])
        # Max over slots and not ReduceMax, which in onnxruntime 1.31 returns two numbers for no ids and two slots.
        slots = [f"{RESERVED}{len(self.nodes)}.{place}" for place in range(id_files.largest_bucket)]
        self.nodes.append(
            helper.make_node("Split", [rows], slots, name=slots[0], axis=-1, num_outputs=id_files.largest_bucket)
        )
        row = self._add("Squeeze", [self._add("Max", slots), self._constant(np.array([-1]))])
        zero = self._constant(np.int64(0))
        vectors = self._rows_of_codes(self._add("Max", [row, zero]), parts)
        known = self._last_axis(self._add("GreaterOrEqual", [row, zero]))
        return self._add("Where", [known, vectors, self._constant(id_files.absent.numpy())])

    def _decoded(self, part: TablePart, positions: str | None) -> str:
        """Add a part's rows as float32, those at `positions` or all."""

        def selected(block: FileBlock) -> str:
            name = self._block(block)
            return name if positions is None else self._add("Gather", [name, positions], axis=0)

        rows = selected(part.matrix)
        if part.matrix.dtype is not torch.float32:
            rows = self._add("Cast", [rows], to=TensorProto.FLOAT)
        if part.grid is None:
            return rows
        grid = selected(part.grid)
        scale, offset = (self._add("Gather", [grid, self._constant(np.array([i]))], axis=-1) for i in (0, 1))
        return self._add("Add", [self._add("Mul", [rows, scale]), offset])

    def _pooled(self, not_null: str, rows: str, pooling: str) -> str:
        """Add one vector [B, D] for each list of rows [B, L, D]: nulls do not count, an empty list gives zeros."""
        axis = self._constant(np.array([1]))
        mask = self._last_axis(not_null)
        counts = self._add("Cast", [not_null], to=TensorProto.FLOAT)
        number = self._add("ReduceSum", [counts, axis], keepdims=1)  # [B, 1]
        zero = self._constant(np.float32(0))
        if pooling == "max":
            lowest = self._constant(np.float32(-np.inf))
            maxima = self._add("ReduceMax", [self._add("Where", [mask, rows, lowest]), axis], keepdims=0)
            return self._add("Where", [self._add("Greater", [number, zero]), maxima, zero])
        total = self._add("ReduceSum", [self._add("Where", [mask, rows, zero]), axis], keepdims=0)
        if pooling == "sum":
            return total
        return self._add("Div", [total, self._add("Max", [number, self._constant(np.float32(1))])])

    def _last_axis(self, x: str) -> str:
        return self._add("Unsqueeze", [x, self._constant(np.array([-1]))])

    def _add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        return self._named(op, inputs, f"{RESERVED}{len(self.nodes)}", **attributes)

    def _named(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def _constant(self, value: Any) -> str:
        name = f"{RESERVED}constant.{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _block(self, block: FileBlock) -> str:
        if block.name not in self._blocks:
            self._blocks.add(block.name)
            self.files[block.file] = None
            tensor = TensorProto(name=block.name, data_type=_TYPES[block.dtype], dims=block.shape)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": block.file, "offset": block.offset, "length": block.bytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            self.initializers.append(tensor)
        return block.name
