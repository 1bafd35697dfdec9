"""A saved model as programs of torch (`torch.export`), which need torch alone: no class of headrace, no pickle of one.

    model.pt2 (query.pt2, item.pt2)   lookups and network; the network's weights are in it
    items.npy, table-N-P.bin, keys-N.bin, export.json   as of ONNX

A program's arguments are its inputs, then its tables, which a reader maps from their files (`tables` of export.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.export import record
from headrace.export.model_record import finish, tables_of
from headrace.export.network import ROWS, Argument, ExportedNetwork, NetworkGraphs
from headrace.export.table_files import FILE_BYTES, Block, Precision, TableFiles, total_bytes, write_tables
from headrace.export.torch_lookups import LookupsAndNetwork
from headrace.export.traced import traced
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location


def write_torch(
    model: ShardedModel, card: ModelCard, folder: Location, precision: Precision, file_bytes: int = FILE_BYTES
) -> int:
    """Write an export of a model into an empty folder: see `onnx_model.write_onnx`, whose arguments these are.

    Raises:
        UserError: torch cannot trace the model's class. Nothing is written then.
    """
    exported = ExportedNetwork(model)
    used = {graph: _used(exported, graph) for graph in exported.graphs}
    tables = write_tables(exported, tables_of(exported, used.values()), folder, precision, file_bytes)
    graphs = {graph: _write_graph(exported, graph, tables, used[graph], folder) for graph in exported.graphs}
    finish(exported, card, folder, "torch", precision, graphs)
    return total_bytes(tables)


def _used(exported: ExportedNetwork, graph: str) -> set[str]:
    """Return the names of the arguments that a graph reads."""
    program = traced(NetworkGraphs(exported, [graph]).eval(), exported.arguments, exported.model.config.kind)
    nodes = program.graph_module.graph
    nodes.eliminate_dead_code()
    by_node = {node.name: node for node in nodes.nodes}
    return {
        a.name
        for a, name in zip(exported.arguments, program.graph_signature.user_inputs, strict=True)
        if by_node[str(name)].users
    }


def _write_graph(
    exported: ExportedNetwork, graph: str, tables: Mapping[str, TableFiles], used: set[str], folder: Location
) -> record.Graph:
    module = LookupsAndNetwork(exported, graph, tables, used).eval()
    program = traced(module, module.arguments, exported.model.config.kind)
    file = f"{graph}.pt2"
    with (folder / file).new_file() as path, open(path, "wb") as out:
        torch.export.save(program, out)
    given: Any = program.graph_module.graph.output_node().args[0]
    widths = [tuple(x.meta["val"].shape[1:]) for x in given]
    outputs = [
        record.Tensor(name=name, dtype="float32", shape=(ROWS, *width))
        for name, width in zip(exported.outputs(graph), widths, strict=True)
    ]
    return record.Graph(
        file=file,
        inputs=tuple(_tensor(a) for a in module.inputs),
        outputs=tuple(outputs),
        files=tuple(dict.fromkeys(b.file for b in module.blocks)),
        tables=tuple(_table(b) for b in module.blocks),
    )


def _tensor(a: Argument) -> record.Tensor:
    return record.Tensor(name=a.name, dtype=_name(a.dtype), shape=a.shape)


def _table(b: Block) -> record.Table:
    return record.Table(name=b.name, file=b.file, offset=b.offset, dtype=_name(b.dtype), shape=b.shape)


def _name(dtype: torch.dtype) -> record.Dtype:
    found: record.Dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    return found
