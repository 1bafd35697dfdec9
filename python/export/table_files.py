"""Embedding tables as files beside a graph: rows in ranges, as float32, float16, or 8-bit codes with a grid by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from headrace.embeddings.checkpoint.index import WEIGHT
from headrace.embeddings.checkpoint.shards import local_blocks
from headrace.embeddings.storage.dtypes import DTYPES, decode, encode
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location

#: How rows are in the files. int8: uint8 codes, and two float32 by row, so that number = offset + scale * code.
Precision = Literal["fp32", "fp16", "int8"]
#: Rows that are in memory at once.
_ROWS = 1 << 16
#: Where a second block of a file begins: a multiple of so many bytes, that it can be mapped.
_PAGE = 4096
#: Bytes of scale and offset behind the codes of a row as headrace stores it.
_GRID = 8


@dataclass(frozen=True)
class Block:
    """A matrix within a file.

    Attributes:
        name: in the graph.
        file: below the export's folder.
        offset: its first byte there.
        dtype: of its numbers.
        rows: of them.
        columns: of a row.
    """

    name: str
    file: str
    offset: int
    dtype: torch.dtype
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """In the file."""
        return self.rows * self.columns * self.dtype.itemsize


@dataclass(frozen=True)
class TablePart:
    """Consecutive rows of a table, from `start` on; `grid`: of int8, their scales and offsets float32 [rows, 2]."""

    start: int
    matrix: Block
    grid: Block | None = None


def write_tables(
    model: ShardedModel, folder: Location, precision: Precision, file_bytes: int
) -> dict[str, list[TablePart]]:
    """Write all tables of a model into files of a folder, a few thousand rows in memory at a time.

    Args:
        model: on one rank; its rows may be mapped, and stored in any way.
        folder: of the files.
        precision: of the files' numbers. Of tables that were stored coarser, what the model computes with.
        file_bytes: of a file at most, one row at least.

    Returns:
        By table, its parts in order.
    """
    found: dict[str, list[TablePart]] = {}
    for number, (table, rows) in enumerate(sorted(stored_rows(model).items())):
        width = model.embeddings.plan.by_name[table].dim
        each = width + _GRID if precision == "int8" else width * DTYPES[precision].itemsize
        most = max(1, file_bytes // each)
        found[table] = [
            _write_part(rows[start : start + most], start, width, precision, folder, f"table-{number}-{part}")
            for part, start in enumerate(range(0, max(1, len(rows)), most))
        ]
    return found


def stored_rows(model: ShardedModel) -> Mapping[str, Tensor]:
    """By table of codes, its rows as stored [N, stored width], in the order of codes: views."""
    embeddings = model.embeddings
    found: dict[str, Tensor] = {}
    for held in local_blocks(embeddings, WEIGHT):
        if held.columns is not None or held.rows != range(embeddings.plan.by_name[held.table].rows):
            raise ValueError(f"table '{held.table}' is not whole on this rank")
        found[held.table] = embeddings.weights[held.fused][held.first : held.first + len(held.rows)]
    return found


def _write_part(rows: Tensor, start: int, width: int, precision: Precision, folder: Location, name: str) -> TablePart:
    dtype, file = DTYPES[precision], f"{name}.bin"
    matrix = Block(name, file, 0, dtype, len(rows), width)
    with (folder / file).new_file() as path, open(path, "wb") as out:
        if precision != "int8":
            for chunk in _chunks(rows):
                _write(out, chunk.to(dtype))
            return TablePart(start, matrix)
        grid = Block(f"{name}.grid", file, -(-matrix.bytes // _PAGE) * _PAGE, torch.float32, len(rows), 2)
        for chunk in _chunks(rows):
            _write(out, encode(chunk, dtype)[:, :width])
        out.seek(grid.offset)
        for chunk in _chunks(rows):
            _write(out, encode(chunk, dtype)[:, width:].contiguous().view(torch.float32))
    return TablePart(start, matrix, grid)


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    """float32."""
    for start in range(0, len(rows), _ROWS):
        yield decode(rows[start : start + _ROWS])


def _write(out: BinaryIO, numbers: Tensor) -> None:
    out.write(numbers.contiguous().numpy().tobytes())


def total_bytes(tables: Mapping[str, Sequence[TablePart]]) -> int:
    """Of all matrices."""
    blocks = (b for parts in tables.values() for part in parts for b in (part.matrix, part.grid) if b is not None)
    return sum(b.bytes for b in blocks)
