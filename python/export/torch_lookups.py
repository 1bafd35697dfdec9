"""Lookups as a torch module: from the features that a program asks for to what the network is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from headrace.export.network import (
    CONTINUOUS,
    ROWS,
    Argument,
    ExportedNetwork,
    NetworkGraphs,
    ids_name,
    is_sequence,
    lengths_name,
    vectors_name,
)
from headrace.export.table_files import Block, IdFiles, TableFiles, TablePart
from headrace.models.lookups import EmbeddingLookup
from headrace.schema import NULL_CODE, Feature, Kind


class LookupsAndNetwork(nn.Module):
    """One of a model's graphs, of its features and of the blocks of its tables.

    Args:
        exported: the network.
        graph: which.
        tables: the tables' files.
        used: names of `ExportedNetwork.arguments` that the graph reads; others are given zeros.
    """

    def __init__(
        self, exported: ExportedNetwork, graph: str, tables: Mapping[str, TableFiles], used: Collection[str]
    ) -> None:
        super().__init__()
        self.graphs = NetworkGraphs(exported, [graph])
        self._exported, self._tables, self._used = (exported,), tables, frozenset(used)
        lookups = [w for w in exported.lookups if vectors_name(w.name) in used]
        read = {w.feature for w in lookups if w.ids == "batch"}
        read |= {f for f in exported.features if {ids_name(f), lengths_name(f)} & self._used}
        #: The features' tensors: inputs.
        self.inputs: list[Argument] = []
        if CONTINUOUS in used:
            of = exported.model.schema.of(Kind.CONTINUOUS)
            self.inputs += [Argument(f.name, (ROWS, f.length), torch.float32) for f in of]
        for f in exported.features.values():
            if f.name in read:
                shape = (ROWS, f"{f.name}.length") if f.is_list else (ROWS,)
                self.inputs.append(Argument(f.name, shape, torch.int64))
        named = {b.name: b for w in lookups for b in tables[exported.table_of(w)].blocks}
        #: The tables' tensors, which follow the inputs.
        self.blocks: list[Block] = list(named.values())

    @property
    def arguments(self) -> list[Argument]:
        """Return the arguments of `forward`.

        The number of rows of tables is no part of the program, or examples of them would be.
        """
        (exported,) = self._exported
        lookups = [w for w in exported.lookups if w.ids == "all" and vectors_name(w.name) in self._used]
        whole = {b.name for w in lookups for b in self._tables[exported.table_of(w)].blocks}
        of_blocks = (
            Argument(b.name, b.shape if b.name in whole else (b.name.removesuffix(".grid"), *b.shape[1:]), b.dtype)
            for b in self.blocks
        )
        return [*self.inputs, *of_blocks]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """See NetworkGraphs."""
        (exported,) = self._exported
        by_name = dict(zip([a.name for a in self.inputs], given, strict=False))
        blocks = dict(zip([b.name for b in self.blocks], given[len(self.inputs) :], strict=True))
        rows = given[0].shape[0]
        found: dict[str, Tensor] = {}
        if CONTINUOUS in self._used:
            of = exported.model.schema.of(Kind.CONTINUOUS)
            found[CONTINUOUS] = torch.cat([by_name[f.name] for f in of], dim=1)
        for f in exported.features.values():
            lookups = [w for w in exported.lookups if w.feature == f.name and vectors_name(w.name) in self._used]
            found |= self._found(f, by_name.get(f.name), lookups, blocks)
        for a in exported.arguments:
            if a.name not in found:
                shape = [n if isinstance(n, int) else rows if n == ROWS else 0 for n in a.shape]
                found[a.name] = torch.zeros(shape, dtype=a.dtype)
        out: tuple[Tensor, ...] = self.graphs(*[found[a.name] for a in exported.arguments])
        return out

    def _found(
        self, f: Feature, ids: Tensor | None, lookups: Sequence[EmbeddingLookup], blocks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        (exported,) = self._exported
        found: dict[str, Tensor] = {}
        for w in lookups:
            if w.ids == "all":
                parts = self._tables[exported.table_of(w)].parts
                found[vectors_name(w.name)] = torch.cat([_decoded(p, None, blocks) for p in parts])[: f.cardinality]
        if ids is None:
            return found
        there, flat = ids != NULL_CODE, ids
        if f.is_list:
            found[lengths_name(f.name)] = there.sum(1)
            flat = ids.flatten().index_select(0, there.flatten().nonzero().squeeze(1))
        found[ids_name(f.name)] = flat
        for w in lookups:
            table = self._tables[exported.table_of(w)]
            if w.ids == "batch":
                rows = _rows(flat if is_sequence(w) else ids, table, blocks)
                is_pooled = f.is_list and not is_sequence(w)
                found[vectors_name(w.name)] = _pooled(there, rows, w.pooling) if is_pooled else rows
        return found


def _rows(ids: Tensor, table: TableFiles, blocks: Mapping[str, Tensor]) -> Tensor:
    """float32 [..., D] of ids of any shape."""
    if table.ids is None:
        return _of_codes(ids, table.parts, blocks)
    return _of_raw_ids(ids, table.ids, table.parts, blocks)


def _of_codes(codes: Tensor, parts: Sequence[TablePart], blocks: Mapping[str, Tensor]) -> Tensor:
    if len(parts) == 1:
        return _decoded(parts[0], codes, blocks)
    found = torch.zeros(())
    for number, part in enumerate(parts):
        local = codes - part.start
        inside = local >= 0
        if number < len(parts) - 1:
            inside = inside & (local < part.rows)
        rows = _decoded(part, torch.where(inside, local, 0), blocks)
        found = found + torch.where(inside.unsqueeze(-1), rows, 0.0)
    return found


def _of_raw_ids(ids: Tensor, of: IdFiles, parts: Sequence[TablePart], blocks: Mapping[str, Tensor]) -> Tensor:
    """See `headrace.export.raw_ids`."""
    first = blocks[of.starts.name][ids.remainder(of.starts.shape[0])].unsqueeze(-1)
    places = (first + torch.arange(of.most)).clamp(max=of.keys.shape[0] - 1)
    hit = blocks[of.keys.name][places] == ids.unsqueeze(-1)
    row = torch.where(hit, places, -1).amax(-1)
    vectors = _of_codes(row.clamp(min=0), parts, blocks)
    return torch.where((row >= 0).unsqueeze(-1), vectors, of.absent)


def _decoded(part: TablePart, places: Tensor | None, blocks: Mapping[str, Tensor]) -> Tensor:
    """Rows of a part as float32: those at `places`, or all."""
    rows = blocks[part.matrix.name] if places is None else blocks[part.matrix.name][places]
    if part.grid is None:
        return rows.float()
    grid = blocks[part.grid.name] if places is None else blocks[part.grid.name][places]
    return rows.float() * grid[..., :1] + grid[..., 1:]


def _pooled(there: Tensor, rows: Tensor, pooling: str) -> Tensor:
    """One vector [B, D] of the rows [B, L, D] of a list, of which those of nulls do not count; zeros of none."""
    mask, number = there.unsqueeze(-1), there.sum(1, keepdim=True)
    if pooling == "max":
        return torch.where(number > 0, torch.where(mask, rows, -torch.inf).amax(1), 0.0)
    total = torch.where(mask, rows, 0.0).sum(1)
    return total / number.clamp(min=1) if pooling == "mean" else total
