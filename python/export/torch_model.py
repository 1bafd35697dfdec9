"""A saved model as programs of torch (`torch.export`), which need only torch: no class of headrace and no pickle.

    model.pt2 (query.pt2, item.pt2)   lookups and network; the network's weights are in it
    items.npy, table-N-P.bin, keys-N.bin, export.json   the same as for ONNX

A program's arguments are its inputs, then its tables, which a reader maps from their files (`tables` of export.json).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.config.schema import NULL_CODE, Feature, Kind
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
    ROWS,
    Argument,
    ExportedNetwork,
    NetworkGraphs,
    ids_name,
    is_sequence,
    lengths_name,
    traced,
    vectors_name,
)
from headrace.models.lookups import EmbeddingLookup
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location


def write_torch(
    model: ShardedModel, card: ModelCard, folder: Location, precision: Precision, file_bytes: int = FILE_BYTES
) -> int:
    """Write an export of a model into an empty folder; for the arguments see `onnx_model.write_onnx`.

    Raises:
        UserError: torch cannot trace the model's class. Nothing is written then.
    """
    exported = ExportedNetwork(model)
    used = {graph: _used(exported, graph) for graph in exported.graphs}
    tables = write_tables(exported, tables_read(exported, used.values()), folder, precision, file_bytes)
    graphs = {graph: _write_graph(exported, graph, tables, used[graph], folder) for graph in exported.graphs}
    write_items_and_record(exported, card, folder, "torch", precision, graphs)
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
) -> record.ExportedGraph:
    module = LookupsAndNetwork(exported, graph, tables, used).eval()
    program = traced(module, module.arguments, exported.model.config.kind)
    file = f"{graph}.pt2"
    with (folder / file).new_file() as path, open(path, "wb") as out:
        torch.export.save(program, out)
    output_nodes: Any = program.graph_module.graph.output_node().args[0]
    widths = [tuple(x.meta["val"].shape[1:]) for x in output_nodes]
    outputs = [
        record.GraphTensor(name=name, dtype="float32", shape=(ROWS, *width))
        for name, width in zip(exported.outputs(graph), widths, strict=True)
    ]
    return record.ExportedGraph(
        file=file,
        inputs=tuple(_tensor(a) for a in module.inputs),
        outputs=tuple(outputs),
        files=tuple(dict.fromkeys(b.file for b in module.blocks)),
        tables=tuple(_table(b) for b in module.blocks),
    )


def _tensor(a: Argument) -> record.GraphTensor:
    return record.GraphTensor(name=a.name, dtype=_dtype_name(a.dtype), shape=a.shape)


def _table(b: FileBlock) -> record.TableArgument:
    return record.TableArgument(name=b.name, file=b.file, offset=b.offset, dtype=_dtype_name(b.dtype), shape=b.shape)


def _dtype_name(dtype: torch.dtype) -> record.Dtype:
    name: record.Dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    return name


class LookupsAndNetwork(nn.Module):
    """A graph of a model, as a function of its features and of the blocks of its tables.

    Args:
        exported: the network.
        graph: name of the graph.
        tables: files of the tables.
        used: names of `ExportedNetwork.arguments` that the graph reads; the others are zeros.
    """

    def __init__(
        self, exported: ExportedNetwork, graph: str, tables: Mapping[str, TableFiles], used: Collection[str]
    ) -> None:
        super().__init__()
        self.graphs = NetworkGraphs(exported, [graph])
        self._exported, self._tables, self._used = (exported,), tables, frozenset(used)
        lookups = [w for w in exported.lookups if vectors_name(w.name) in used]
        used_features = {w.feature for w in lookups if w.ids == "batch"}
        used_features |= {f for f in exported.features if {ids_name(f), lengths_name(f)} & self._used}
        #: The features' tensors: inputs.
        self.inputs: list[Argument] = []
        if CONTINUOUS in used:
            continuous = exported.model.schema.of(Kind.CONTINUOUS)
            self.inputs += [Argument(f.name, (ROWS, f.length), torch.float32) for f in continuous]
        for f in exported.features.values():
            if f.name in used_features:
                shape = (ROWS, f"{f.name}.length") if f.is_list else (ROWS,)
                self.inputs.append(Argument(f.name, shape, torch.int64))
        blocks = {b.name: b for w in lookups for b in tables[exported.table_of(w)].blocks}
        #: The tables' tensors, which follow the inputs.
        self.blocks: list[FileBlock] = list(blocks.values())

    @property
    def arguments(self) -> list[Argument]:
        """Return the arguments of `forward`.

        The number of rows of tables is not part of the program: otherwise it would contain example tables.
        """
        (exported,) = self._exported
        lookups = [w for w in exported.lookups if w.ids == "all" and vectors_name(w.name) in self._used]
        full_blocks = {b.name for w in lookups for b in self._tables[exported.table_of(w)].blocks}
        block_arguments = (
            Argument(
                b.name, b.shape if b.name in full_blocks else (b.name.removesuffix(".grid"), *b.shape[1:]), b.dtype
            )
            for b in self.blocks
        )
        return [*self.inputs, *block_arguments]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the graph's outputs; see `NetworkGraphs`."""
        (exported,) = self._exported
        by_name = dict(zip([a.name for a in self.inputs], tensors, strict=False))
        blocks = dict(zip([b.name for b in self.blocks], tensors[len(self.inputs) :], strict=True))
        rows = tensors[0].shape[0]
        arguments: dict[str, Tensor] = {}
        if CONTINUOUS in self._used:
            continuous = exported.model.schema.of(Kind.CONTINUOUS)
            arguments[CONTINUOUS] = torch.cat([by_name[f.name] for f in continuous], dim=1)
        for f in exported.features.values():
            lookups = [w for w in exported.lookups if w.feature == f.name and vectors_name(w.name) in self._used]
            arguments |= self._lookup_results(f, by_name.get(f.name), lookups, blocks)
        for a in exported.arguments:
            if a.name not in arguments:
                shape = [n if isinstance(n, int) else rows if n == ROWS else 0 for n in a.shape]
                arguments[a.name] = torch.zeros(shape, dtype=a.dtype)
        out: tuple[Tensor, ...] = self.graphs(*[arguments[a.name] for a in exported.arguments])
        return out

    def _lookup_results(
        self, f: Feature, ids: Tensor | None, lookups: Sequence[EmbeddingLookup], blocks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        (exported,) = self._exported
        results: dict[str, Tensor] = {}
        for w in lookups:
            if w.ids == "all":
                parts = self._tables[exported.table_of(w)].parts
                results[vectors_name(w.name)] = torch.cat([_decoded(p, None, blocks) for p in parts])[: f.cardinality]
        if ids is None:
            return results
        not_null, flat = ids != NULL_CODE, ids
        if f.is_list:
            results[lengths_name(f.name)] = not_null.sum(1)
            flat = ids.flatten().index_select(0, not_null.flatten().nonzero().squeeze(1))
        results[ids_name(f.name)] = flat
        for w in lookups:
            table = self._tables[exported.table_of(w)]
            if w.ids == "batch":
                rows = _rows(flat if is_sequence(w) else ids, table, blocks)
                is_pooled = f.is_list and not is_sequence(w)
                results[vectors_name(w.name)] = _pooled(not_null, rows, w.pooling) if is_pooled else rows
        return results


def _rows(ids: Tensor, table: TableFiles, blocks: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of ids of any shape: float32 [..., D]."""
    if table.ids is None:
        return _rows_of_codes(ids, table.parts, blocks)
    return _rows_of_raw_ids(ids, table.ids, table.parts, blocks)


def _rows_of_codes(codes: Tensor, parts: Sequence[TablePart], blocks: Mapping[str, Tensor]) -> Tensor:
    if len(parts) == 1:
        return _decoded(parts[0], codes, blocks)
    combined = torch.zeros(())
    for number, part in enumerate(parts):
        local = codes - part.start
        inside = local >= 0
        if number < len(parts) - 1:
            inside = inside & (local < part.rows)
        rows = _decoded(part, torch.where(inside, local, 0), blocks)
        combined = combined + torch.where(inside.unsqueeze(-1), rows, 0.0)
    return combined


def _rows_of_raw_ids(
    ids: Tensor, id_files: IdFiles, parts: Sequence[TablePart], blocks: Mapping[str, Tensor]
) -> Tensor:
    """Return the rows of raw ids, float32 [..., D]; `headrace.export.files` describes the search in their files."""
    first = blocks[id_files.starts.name][ids.remainder(id_files.starts.shape[0])].unsqueeze(-1)
    positions = (first + torch.arange(id_files.largest_bucket)).clamp(max=id_files.keys.shape[0] - 1)
    hit = blocks[id_files.keys.name][positions] == ids.unsqueeze(-1)
    row = torch.where(hit, positions, -1).amax(-1)
    vectors = _rows_of_codes(row.clamp(min=0), parts, blocks)
    return torch.where((row >= 0).unsqueeze(-1), vectors, id_files.absent)


def _decoded(part: TablePart, positions: Tensor | None, blocks: Mapping[str, Tensor]) -> Tensor:
    """Return a part's rows as float32, those at `positions` or all."""
    rows = blocks[part.matrix.name] if positions is None else blocks[part.matrix.name][positions]
    if part.grid is None:
        return rows.float()
    grid = blocks[part.grid.name] if positions is None else blocks[part.grid.name][positions]
    return rows.float() * grid[..., :1] + grid[..., 1:]


def _pooled(not_null: Tensor, rows: Tensor, pooling: str) -> Tensor:
    """Return one vector [B, D] for each list of rows [B, L, D]: nulls do not count, an empty list gives zeros."""
    mask, number = not_null.unsqueeze(-1), not_null.sum(1, keepdim=True)
    if pooling == "max":
        return torch.where(number > 0, torch.where(mask, rows, -torch.inf).amax(1), 0.0)
    total = torch.where(mask, rows, 0.0).sum(1)
    return total / number.clamp(min=1) if pooling == "mean" else total
