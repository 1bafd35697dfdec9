"""Lookups as ONNX nodes: from the features that a graph asks for to what the network is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from headrace.export.network import (
    CONTINUOUS,
    RESERVED,
    ROWS,
    ExportedNetwork,
    ids_name,
    is_sequence,
    lengths_name,
    vectors_name,
)
from headrace.export.table_files import Block, IdFiles, TableFiles, TablePart
from headrace.models.lookups import EmbeddingLookup
from headrace.schema import NULL_CODE, Feature, Kind

_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.uint8: TensorProto.UINT8,
    torch.int64: TensorProto.INT64,
}


class LookupNodes:
    """The nodes before a network's own, the tensors that they read, and the inputs that they ask for.

    Args:
        exported: the network.
        tables: its tables' files.
        used: names of `ExportedNetwork.arguments` that the network's graph reads.
    """

    def __init__(self, exported: ExportedNetwork, tables: Mapping[str, TableFiles], used: Collection[str]) -> None:
        self._exported, self._tables, self._used = exported, tables, set(used)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        #: Files of tables that are read, in order.
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
                self._named("Identity", [self._whole(w, f)], vectors_name(w.name))
        of_rows = [w for w in lookups if w.ids == "batch"]
        wants_ids, wants_lengths = ids_name(f.name) in self._used, lengths_name(f.name) in self._used
        if not of_rows and not wants_ids and not wants_lengths:
            return
        shape = [ROWS, f"{f.name}.length"] if f.is_list else [ROWS]
        self.inputs.append(helper.make_tensor_value_info(f.name, TensorProto.INT64, shape))
        if not f.is_list:
            if wants_ids:
                self._named("Identity", [f.name], ids_name(f.name))
            for w in of_rows:
                self._named("Identity", [self._rows(f.name, w)], vectors_name(w.name))
            return
        there = self._add("Not", [self._add("Equal", [f.name, self._constant(np.int64(NULL_CODE))])])
        if wants_lengths:
            ones = self._add("Cast", [there], to=TensorProto.INT64)
            axis = self._constant(np.array([1]))
            self._named("ReduceSum", [ones, axis], lengths_name(f.name), keepdims=0)
        if wants_ids or any(is_sequence(w) for w in of_rows):
            flat = self._constant(np.array([-1]))
            self._named(
                "Compress", [self._add("Reshape", [x, flat]) for x in (f.name, there)], ids_name(f.name), axis=0
            )
        for w in of_rows:
            if is_sequence(w):
                found = self._rows(ids_name(f.name), w)
            else:
                found = self._pooled(there, self._rows(f.name, w), w.pooling)
            self._named("Identity", [found], vectors_name(w.name))

    def _whole(self, w: EmbeddingLookup, f: Feature) -> str:
        """Add the rows of all codes as float32 [cardinality, D]; return the tensor's name."""
        parts, begin = self._tables[self._exported.table_of(w)].parts, self._constant(np.array([0]))
        found = [self._decoded(part, None) for part in parts]
        whole = self._add("Concat", found, axis=0) if len(found) > 1 else found[0]
        return self._add("Slice", [whole, begin, self._constant(np.array([f.cardinality or 0])), begin])

    def _rows(self, ids: str, w: EmbeddingLookup) -> str:
        """Add the rows of ids (any shape) as float32 [..., D].

        A code beyond the last row is an error of the runtime.
        """
        table = self._tables[self._exported.table_of(w)]
        return self._of_codes(ids, table.parts) if table.ids is None else self._of_raw_ids(ids, table.ids, table.parts)

    def _of_codes(self, codes: str, parts: Sequence[TablePart]) -> str:
        found = None
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
            found = rows if found is None else self._add("Add", [found, rows])
        assert found is not None
        return found

    def _of_raw_ids(self, ids: str, of: IdFiles, parts: Sequence[TablePart]) -> str:
        """See `headrace.export.raw_ids`."""
        bucket = self._add("Mod", [ids, self._constant(np.int64(of.starts.shape[0]))])
        first = self._last_axis(self._add("Gather", [self._block(of.starts), bucket], axis=0))
        places = self._add("Add", [first, self._constant(np.arange(of.most))])
        places = self._add("Min", [places, self._constant(np.int64(of.keys.shape[0] - 1))])
        keys = self._add("Gather", [self._block(of.keys), places], axis=0)
        hit = self._add("Equal", [keys, self._last_axis(ids)])
        rows = self._add("Where", [hit, places, self._constant(np.int64(-1))])
        # Not ReduceMax, of which onnxruntime 1.31 gives two numbers where there are no ids and two places.
        each = [f"{RESERVED}{len(self.nodes)}.{place}" for place in range(of.most)]
        self.nodes.append(helper.make_node("Split", [rows], each, name=each[0], axis=-1, num_outputs=of.most))
        row = self._add("Squeeze", [self._add("Max", each), self._constant(np.array([-1]))])
        zero = self._constant(np.int64(0))
        vectors = self._of_codes(self._add("Max", [row, zero]), parts)
        known = self._last_axis(self._add("GreaterOrEqual", [row, zero]))
        return self._add("Where", [known, vectors, self._constant(of.absent.numpy())])

    def _decoded(self, part: TablePart, places: str | None) -> str:
        """Rows of a part as float32: those at `places`, or all."""

        def of(block: Block) -> str:
            name = self._block(block)
            return name if places is None else self._add("Gather", [name, places], axis=0)

        rows = of(part.matrix)
        if part.matrix.dtype is not torch.float32:
            rows = self._add("Cast", [rows], to=TensorProto.FLOAT)
        if part.grid is None:
            return rows
        grid = of(part.grid)
        scale, offset = (self._add("Gather", [grid, self._constant(np.array([i]))], axis=-1) for i in (0, 1))
        return self._add("Add", [self._add("Mul", [rows, scale]), offset])

    def _pooled(self, there: str, rows: str, pooling: str) -> str:
        """One vector [B, D] of the rows [B, L, D] of a list, of which those of nulls do not count; zeros of none."""
        axis = self._constant(np.array([1]))
        mask = self._last_axis(there)
        counts = self._add("Cast", [there], to=TensorProto.FLOAT)
        number = self._add("ReduceSum", [counts, axis], keepdims=1)  # [B, 1]
        zero = self._constant(np.float32(0))
        if pooling == "max":
            lowest = self._constant(np.float32(-np.inf))
            most = self._add("ReduceMax", [self._add("Where", [mask, rows, lowest]), axis], keepdims=0)
            return self._add("Where", [self._add("Greater", [number, zero]), most, zero])
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

    def _block(self, block: Block) -> str:
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
