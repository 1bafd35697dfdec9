"""Saved tables of raw ids as files that all processes of a host map, for scoring: nothing is admitted or learned.

    table-0.json   ids of each part
    table-0.ids    int64, ascending in each part
    table-0.rows   as they were saved, in the order of the ids

A part is the ids that one rank saved, those with hashes in its range. An id is found by binary search in the sorted ids
of its part: no process has a hash table of the ids. Files are copied piece by piece: a saved table may be larger than
the memory.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import safetensors
import torch
from torch import Tensor

from headrace.comm import World
from headrace.config.embeddings import EmbeddingOptimizer
from headrace.embeddings.addressing import owners
from headrace.embeddings.checkpoint.dynamic import saved_files
from headrace.embeddings.checkpoint.files import PIECE_BYTES, check_file, load_tensors
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.kernels.id_map import Ids
from headrace.storage import Location


class SortedIds:
    """Map from ids to rows like `IdMap`, over ids that are sorted part by part.

    Args:
        ids: int64 [rows], perhaps mapped; in each part ascending.
        parts: rows of each part, those of the ranks among which ids were divided.
    """

    def __init__(self, ids: Ids, parts: Sequence[int]) -> None:
        self.ids = ids
        self._ends = [0, *accumulate(parts)]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def load(self) -> float:
        """Share of slots that are taken: all."""
        return 1.0 if len(self) else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own memory: none."""
        return 0

    def find(self, ids: Ids) -> Ids:
        """Return the row of each id [N]; -1 where it has none."""
        rows = np.full(len(ids), -1, np.int64)
        ranks = len(self._ends) - 1
        part_of = owners(np.ascontiguousarray(ids), ranks) if ranks > 1 else np.zeros(len(ids), np.int64)
        for part in range(ranks):
            start, end = self._ends[part], self._ends[part + 1]
            id_positions = np.flatnonzero(part_of == part)
            if start == end or not len(id_positions):
                continue
            part_ids = self.ids[start:end]
            positions = np.minimum(np.searchsorted(part_ids, ids[id_positions]), len(part_ids) - 1)
            is_known = part_ids[positions] == ids[id_positions]
            rows[id_positions[is_known]] = start + positions[is_known]
        return rows


class MappedRows(HostRows):
    """Saved table of raw ids whose ids and rows are mapped.

    Args:
        spec: what is asked of the table.
        world: this process alone.
        ids: see SortedIds.
        weight: the rows as they were stored, [rows, D].
    """

    _map: SortedIds  # type: ignore[assignment]

    def __init__(self, spec: DynamicSpec, world: World, ids: SortedIds, weight: Tensor) -> None:
        super().__init__(spec, world, seed=0)  # of rows' starts: none starts here
        self._map, self._weight = ids, weight

    @property
    def ids(self) -> Ids:
        """The id of each row: int64 [rows]."""
        return self._map.ids

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own memory: none."""
        return 0

    def look_up(self, ids: Ids, counts: Ids, training: bool) -> Ids:
        """Return the row of each id [N], -1 where it has none; see HostRows. Raises RuntimeError in training."""
        if training:
            _refuse()
        return super().look_up(ids, counts, training)

    def rows_at(self, rows: Ids) -> Tensor:
        """Return the vectors of rows [N], zeros where -1: float32 [N, D]."""
        return super().rows_at(rows).to(torch.float32)

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Raise RuntimeError: mapped rows are not trained."""
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("rows that are mapped are read alone: load the model to train it")


def mapped_matrix(file: Location, rows: int, columns: int, dtype: torch.dtype, *, write: bool = False) -> Tensor:
    """Map a file as a matrix [rows, columns]; with `write` a new file of zeros, whose changes go to the disk."""
    size = rows * columns * dtype.itemsize
    if not size:
        return torch.empty(rows, columns, dtype=dtype)
    with open(file.local_path(), "w+b" if write else "rb") as f:
        if write:
            f.truncate(size)
        pages = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    with warnings.catch_warnings():  # the matrix is read only
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(pages, dtype=dtype).view(rows, columns)


def write_mapped(spec: DynamicSpec, number: int, saved: Location, folder: Location) -> None:
    """Copy a saved table of raw ids into files to be mapped.

    Args:
        spec: which table.
        number: of the files.
        saved: where `save_dynamic` wrote.
        folder: of the files.

    Raises:
        UserError: a file is missing or damaged, or the table has another dim.
    """
    counts, dtype = [], "float32"
    with (
        open((folder / f"table-{number}.ids").local_path(), "wb") as ids,
        open((folder / f"table-{number}.rows").local_path(), "wb") as rows,
    ):
        for record in saved_files(saved, spec):
            check_file(saved, record)
            with safetensors.safe_open((saved / record.name).local_path(), "pt") as file:
                id_slice, row_slice = file.get_slice("ids"), file.get_slice("weight")
                count = id_slice.get_shape()[0]
                step = max(1, PIECE_BYTES // (8 * max(1, spec.dim)))
                last = None
                begins = ids.tell(), rows.tell()
                for start in range(0, count, step):
                    chunk_ids, vectors = id_slice[start : start + step], row_slice[start : start + step]
                    numbers = chunk_ids.numpy()
                    if (last is not None and numbers[0] <= last) or (numbers[1:] <= numbers[:-1]).any():
                        break
                    last, dtype = numbers[-1], str(vectors.dtype).removeprefix("torch.")
                    ids.write(numbers.tobytes())
                    rows.write(_bytes(vectors))
                else:
                    counts.append(count)
                    continue
            # A save whose ids do not ascend is sorted in memory.
            for out, begin in zip((ids, rows), begins, strict=True):
                out.seek(begin)
                out.truncate()
            tensors = load_tensors(saved, record)
            order = torch.argsort(tensors["ids"])
            ids.write(tensors["ids"][order].numpy().tobytes())
            rows.write(_bytes(tensors["weight"][order]))
            dtype = str(tensors["weight"].dtype).removeprefix("torch.")
            counts.append(count)
    (folder / f"table-{number}.json").put_text(json.dumps({"parts": counts, "dtype": dtype}) + "\n")


def open_mapped(spec: DynamicSpec, number: int, folder: Location) -> MappedRows:
    """Map the table that `write_mapped` wrote."""
    description = json.loads((folder / f"table-{number}.json").read_text())
    count = sum(description["parts"])
    ids = np.empty(0, np.int64)
    if count:
        ids = np.asarray(np.memmap((folder / f"table-{number}.ids").local_path(), np.int64, "r", shape=(count,)))
    weight = mapped_matrix(folder / f"table-{number}.rows", count, spec.dim, getattr(torch, description["dtype"]))
    return MappedRows(spec, World(0, 1), SortedIds(ids, description["parts"]), weight)


def _bytes(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
