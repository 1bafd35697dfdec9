"""Embedding tables as files beside a graph: rows in ranges, as float32, float16, or 8-bit codes with a grid by row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.embeddings.checkpoint.index import WEIGHT
from headrace.embeddings.checkpoint.shards import local_blocks
from headrace.embeddings.storage import DTYPES, decode, encode
from headrace.export.network import ExportedNetwork
from headrace.export.raw_ids import Buckets, bucketed
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location

#: How rows are in the files. int8: uint8 codes, and two float32 by row, so that number = offset + scale * code.
Precision = Literal["fp32", "fp16", "int8"]
#: Bytes of a table's file at most.
FILE_BYTES = 2 << 30
#: Rows that are in memory at once.
_ROWS = 1 << 16
#: Where a second block of a file begins: a multiple of so many bytes, that it can be mapped.
_PAGE = 4096
#: Bytes of scale and offset behind the codes of a row as headrace stores it.
_GRID = 8


@dataclass(frozen=True)
class Block:
    """A tensor within a file.

    Attributes:
        name: in the graph.
        file: below the export's folder.
        offset: its first byte there.
        dtype: of its numbers.
        shape: its sizes.
    """

    name: str
    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the file in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class TablePart:
    """Consecutive rows of a table, from `start` on; `grid`: of int8, their scales and offsets float32 [rows, 2]."""

    start: int
    matrix: Block
    grid: Block | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.matrix.shape[0]


@dataclass(frozen=True)
class IdFiles:
    """Files that map an id of a table of raw ids to its row: see `headrace.export.raw_ids`.

    Attributes:
        keys: the ids in the order of their rows: int64 [rows].
        starts: the first row of each bucket: int64 [buckets].
        most: ids of a bucket at most.
        absent: what stands for an id without a row: float32 [D].
    """

    keys: Block
    starts: Block
    most: int
    absent: Tensor


@dataclass(frozen=True)
class TableFiles:
    """A table: its rows, and of one of raw ids where an id's row is."""

    parts: Sequence[TablePart]
    ids: IdFiles | None = None

    @property
    def blocks(self) -> list[Block]:
        """All that is in files."""
        found = [b for part in self.parts for b in (part.matrix, part.grid) if b is not None]
        return found if self.ids is None else [*found, self.ids.keys, self.ids.starts]


def write_tables(
    exported: ExportedNetwork, names: Collection[str], folder: Location, precision: Precision, file_bytes: int
) -> dict[str, TableFiles]:
    """Write tables of a model into files of a folder, a few thousand rows in memory at a time.

    Of raw ids there are besides 24 bytes an id in memory, by which they are put in order.

    Args:
        exported: of a model on one rank; its rows may be mapped, and stored in any way.
        names: of the tables.
        folder: of the files.
        precision: of the files' numbers. Of tables that were stored coarser, what the model computes with.
        file_bytes: of a table's file at most, one row at least.
    """
    stored = stored_rows(exported)
    found: dict[str, TableFiles] = {}
    raw = _raw_ids_of(exported.model)
    for number, table in enumerate(sorted(names)):
        name = f"table-{number}"
        if table not in raw:
            found[table] = TableFiles(_write_parts(*_rows(stored[table]), precision, folder, name, file_bytes))
            continue
        ids, weight, absent = raw[table]
        if not len(ids):  # one row that no id has: of id 0 it says the same
            ids, weight = np.zeros(1, np.int64), absent.unsqueeze(0)
        buckets = bucketed(ids)
        parts = _write_parts(*_ordered(weight, buckets), precision, folder, name, file_bytes)
        found[table] = TableFiles(parts, _write_ids(buckets, absent, folder, number))
    return found


def stored_rows(exported: ExportedNetwork) -> dict[str, Tensor]:
    """Return the rows of each table of codes as stored [N, stored width], in the order of codes: views."""
    embeddings = exported.model.embeddings
    found: dict[str, Tensor] = {}
    for held in local_blocks(embeddings, WEIGHT):
        if held.columns is not None or held.rows != range(embeddings.plan.by_name[held.table].rows):
            raise ValueError(f"table '{held.table}' is not whole on this rank")
        found[held.table] = embeddings.weights[held.fused][held.first : held.first + len(held.rows)]
    return found | dict(exported.tables)


def _raw_ids_of(model: ShardedModel) -> dict[str, tuple[NDArray[np.int64], Tensor, Tensor]]:
    """Return by table of raw ids: ids int64 [N], their rows as stored [N, D], and the vector of unknown ids [D]."""
    if model.dynamic is None or model.absent is None:
        return {}
    tables = zip(model.dynamic.tables, model.absent, strict=True)
    return {t.spec.name: (np.asarray(t.ids), t.weight, absent.detach()) for t, absent in tables}


#: Rows a .. b - 1 of a table, float32.
_Rows = Callable[[int, int], Tensor]


def _rows(stored: Tensor) -> tuple[int, int, _Rows]:
    """Return the number of rows, their width, and a reader of them."""
    width = stored.shape[1] - _GRID if stored.dtype is torch.uint8 else stored.shape[1]
    return len(stored), width, lambda a, b: decode(stored[a:b])


def _ordered(weight: Tensor, buckets: Buckets) -> tuple[int, int, _Rows]:
    return len(weight), weight.shape[1], lambda a, b: weight[torch.from_numpy(buckets.order[a:b])].float()


def _write_parts(
    count: int, width: int, rows: _Rows, precision: Precision, folder: Location, name: str, file_bytes: int
) -> list[TablePart]:
    each = width + _GRID if precision == "int8" else width * DTYPES[precision].itemsize
    most = max(1, file_bytes // each)
    return [
        _write_part(rows, start, min(start + most, count), width, precision, folder, f"{name}-{part}")
        for part, start in enumerate(range(0, max(1, count), most))
    ]


def _write_part(
    rows: _Rows, start: int, end: int, width: int, precision: Precision, folder: Location, name: str
) -> TablePart:
    dtype, file = DTYPES[precision], f"{name}.bin"
    matrix = Block(name, file, 0, dtype, (end - start, width))
    with (folder / file).new_file() as path, open(path, "wb") as out:
        if precision != "int8":
            for chunk in _chunks(rows, start, end):
                _write(out, chunk.to(dtype))
            return TablePart(start, matrix)
        grid = Block(f"{name}.grid", file, _next_page(matrix.bytes), torch.float32, (end - start, 2))
        for chunk in _chunks(rows, start, end):
            _write(out, encode(chunk, dtype)[:, :width])
        out.seek(grid.offset)
        for chunk in _chunks(rows, start, end):
            _write(out, encode(chunk, dtype)[:, width:].contiguous().view(torch.float32))
    return TablePart(start, matrix, grid)


def _write_ids(buckets: Buckets, absent: Tensor, folder: Location, number: int) -> IdFiles:
    file = f"keys-{number}.bin"
    keys = Block(f"keys-{number}", file, 0, torch.int64, (len(buckets.keys),))
    starts = Block(f"keys-{number}.starts", file, _next_page(keys.bytes), torch.int64, (len(buckets.starts),))
    with (folder / file).new_file() as path, open(path, "wb") as out:
        buckets.keys.tofile(out)
        out.seek(starts.offset)
        buckets.starts.tofile(out)
    return IdFiles(keys, starts, buckets.most, absent)


def _next_page(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _chunks(rows: _Rows, start: int, end: int) -> Iterator[Tensor]:
    for first in range(start, end, _ROWS):
        yield rows(first, min(first + _ROWS, end))


def _write(out: BinaryIO, numbers: Tensor) -> None:
    out.write(numbers.contiguous().numpy().tobytes())


def total_bytes(tables: Mapping[str, TableFiles]) -> int:
    """Return the bytes of all tables."""
    return sum(b.bytes for table in tables.values() for b in table.blocks)
