"""Single rows of saved tables: files are mapped, and the requested rows are copied.

    files = files_of(model / "embeddings", model / "dynamic", tables, raw)
    requested = {n: codes[f.may_have("user", codes)] for n, f in enumerate(files)}
    parts = [rows for n, f in enumerate(files) for rows in f.read("user", requested[n])]
    rows = assemble(tables["user"], parts)

A save of changed rows lies on top of others (`read_chain`): a row may be in several files, the newest counts. A
table that was saved by columns has a row's values in several files.

Rows that a save lacks begin as the mean of its rows, or of the rows of their segment. A new id then begins as an
average one, whose vector the dense part knows how to read, and moves from there. (For ids that start cold, means over
similar ids are a common start: Briand et al., "A Semi-Personalized System for User Cold Start Recommendation", 2021.)
Optimizer states of new rows stay those of rows that no step has touched, at zero, so that they learn at the full rate.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.embeddings.addressing import owners
from headrace.embeddings.checkpoint.dynamic import saved_files
from headrace.embeddings.checkpoint.files import WEIGHT, FileChunk, FileRecord, check_file, read_chain
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.layout import TableRows
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.sharding_plan import Block, Table
from headrace.embeddings.storage import DTYPES, convert, decode, encode, stored_width
from headrace.errors import UserError
from headrace.storage import Location, StoreAway

Codes = NDArray[np.int64]

#: torch types by their names in safetensors, for rows and row numbers.
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}


@dataclass(frozen=True)
class FoundRows:
    """Rows read from one file.

    Attributes:
        level: of the save, 0 the oldest: rows of a higher one replace those of a lower.
        first_column: of the numbers; -1: whole rows.
        dtype: safetensors' name of how they are stored.
        codes: of the rows, int64 [n].
        rows: uint8 [n, bytes of a row].
    """

    level: int
    first_column: int
    dtype: str
    codes: Codes
    rows: NDArray[np.uint8]


@dataclass(frozen=True)
class _RawIds:
    """A file of a table of raw ids: one of so many among which ids are divided by their hash."""

    table: str
    rank: int
    ranks: int


@dataclass(frozen=True)
class SavedFile:
    """A file of a save that has rows of the tables asked for; small and picklable."""

    folder: Location
    record: FileRecord
    level: int
    pieces: tuple[FileChunk | _RawIds, ...]

    def may_have(self, table: str, codes: Codes) -> NDArray[np.bool_]:
        """Return which of the codes [n] this file may have: bool [n]."""
        mask = np.zeros(len(codes), np.bool_)
        for piece in self.pieces:
            if piece.table != table:
                continue
            if isinstance(piece, _RawIds):
                mask |= owners(codes, piece.ranks) == piece.rank
            elif piece.rows_key is not None:
                mask[:] = True
            else:
                mask |= _in_range(piece, codes)
        return mask

    def read(self, table: str, codes: Codes) -> Iterator[FoundRows]:
        """Yield the rows of a table that each part of the file has among codes [n].

        Raises:
            UserError: the file is no file of tables.
        """
        tensors = _Tensors(self.folder / self.record.name)
        for piece in self.pieces:
            if piece.table != table:
                continue
            if isinstance(piece, _RawIds):
                known, positions = _places(tensors.numbers("ids"), codes)
                key, first = "weight", -1
            else:
                key, first = piece.key, -1 if piece.columns is None else piece.columns[0]
                if piece.rows_key is not None:
                    known, positions = _places(tensors.numbers(piece.rows_key), codes)
                else:
                    known = codes[_in_range(piece, codes)]
                    positions = (known - piece.start) // piece.stride
            if len(known):
                dtype, rows = tensors.rows(key)
                yield FoundRows(self.level, first, dtype, known, rows[positions])

    def check(self) -> None:
        """Compare the file with its checksum, reading it once. Raises UserError where it is damaged."""
        check_file(self.folder, self.record)


def files_of(
    embeddings: Location, dynamic: Location, tables: Iterable[str], raw: Sequence[DynamicSpec]
) -> tuple[SavedFile, ...]:
    """Return the files of a saved model that have rows of some tables.

    Args:
        embeddings: of `save_shards`, or of changed rows.
        dynamic: of `save_dynamic`; not looked at where `raw` is empty.
        tables: of codes.
        raw: of raw ids.

    Raises:
        UserError: an index or a record is missing or damaged.
    """
    requested, files = set(tables), []
    for level, (folder, index) in enumerate(read_chain(embeddings)):
        pieces: dict[str, list[FileChunk]] = {}
        for chunk in index.chunks:
            if chunk.state == WEIGHT and chunk.table in requested:
                pieces.setdefault(chunk.file, []).append(chunk)
        records = {r.name: r for r in index.files}
        files += [SavedFile(folder, records[name], level, tuple(chunks)) for name, chunks in pieces.items()]
    for spec in raw:
        raw_records = saved_files(dynamic, spec)
        for rank, record in enumerate(raw_records):
            files.append(SavedFile(dynamic, record, 0, (_RawIds(spec.name, rank, len(raw_records)),)))
    return tuple(files)


def assemble(table: Table | DynamicSpec, parts: Iterable[FoundRows]) -> TableRows:
    """Combine the rows of a table from several files into the form that a lookup takes.

    Args:
        table: of a table of codes, stored as it is to be looked up; rows that were saved in another way are converted
            as `load_shards` does it.
        parts: of all files that may have them, in any order.

    Raises:
        UserError: a table that was saved by columns is stored as int8.
    """
    ordered = sorted(parts, key=lambda x: x.level)
    codes = np.unique(np.concatenate([x.codes for x in ordered])) if ordered else np.empty(0, np.int64)
    if isinstance(table, Table):
        dtype, width = DTYPES[table.storage], stored_width(table.storage, table.dim)
    else:
        dtype, width = (_TYPES[ordered[0].dtype] if ordered else torch.float32), table.dim
    out = torch.zeros(len(codes), width, dtype=dtype)
    for part in ordered:
        positions = torch.from_numpy(np.searchsorted(codes, part.codes))
        values = _tensor(part)
        if part.first_column < 0:
            out[positions] = convert(values, dtype)
            continue
        if dtype is torch.uint8:
            raise UserError(f"table '{table.name}' was saved by columns; int8 stores whole rows: save it by rows first")
        values = decode(values) if values.dtype is torch.uint8 else values
        out[positions, part.first_column : part.first_column + values.shape[1]] = values.to(dtype)
    return TableRows(torch.from_numpy(codes), out)


def _tensor(part: FoundRows) -> Tensor:
    dtype = _TYPES[part.dtype]
    rows = torch.from_numpy(np.ascontiguousarray(part.rows))
    return rows if dtype is torch.uint8 else rows.view(dtype)


def _in_range(chunk: FileChunk, codes: Codes) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = (codes >= chunk.start) & (codes < chunk.stop)
    return inside if chunk.stride == 1 else inside & ((codes - chunk.start) % chunk.stride == 0)


def _places(stored_codes: Codes, codes: Codes) -> tuple[Codes, Codes]:
    """Return the codes that are among `stored_codes`, and their positions there."""
    if not len(stored_codes):
        return codes[:0], codes[:0]
    order = None if bool((stored_codes[1:] >= stored_codes[:-1]).all()) else np.argsort(stored_codes)
    positions = np.minimum(np.searchsorted(stored_codes, codes, sorter=order), len(stored_codes) - 1)
    positions = positions if order is None else order[positions]
    is_known = stored_codes[positions] == codes
    return codes[is_known], positions[is_known]


class _Tensors:
    """The tensors of a safetensors file, mapped: https://huggingface.co/docs/safetensors#format."""

    def __init__(self, path: Location) -> None:
        self._path = path
        try:
            with open(path.local_path(), "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                if size > path.size():
                    raise UserError(f"{path} is no file of tables: its header is longer than the file")
                self._entries: Mapping[str, Any] = json.loads(f.read(size))
        except StoreAway:  # nothing is known of the file
            raise
        except (OSError, ValueError) as e:
            raise UserError(f"{path} is missing or no file of tables: {e}") from None
        self._begin = 8 + size

    def rows(self, key: str) -> tuple[str, NDArray[np.uint8]]:
        """Return the type of a matrix and its rows, mapped: uint8 [n, bytes of a row]."""
        entry = self._entries.get(key)
        if not isinstance(entry, dict) or entry.get("dtype") not in _TYPES:
            raise UserError(f"{self._path} is no file of tables: it has no rows '{key}'")
        (first, end), rows = entry["data_offsets"], entry["shape"][0]
        if first == end:
            return entry["dtype"], np.empty((rows, 0), np.uint8)
        mapped = np.memmap(self._path.local_path(), np.uint8, "r", self._begin + first, (rows, (end - first) // rows))
        return entry["dtype"], np.asarray(mapped)

    def numbers(self, key: str) -> Codes:
        """Return a vector of int64, mapped."""
        dtype, rows = self.rows(key)
        if dtype != "I64":
            raise UserError(f"{self._path} is no file of tables: '{key}' is {dtype}")
        return rows.reshape(-1).view(np.int64) if rows.size else np.empty(0, np.int64)


#: Rows that are decoded or encoded at a time.
_ROWS = 65_536


@dataclass(frozen=True)
class GrownTable:
    """A table with more rows than were saved.

    Attributes:
        known: the rows whose values have a meaning and were saved; special codes come before them.
        segments: int32 [rows of the table], the segment of each row's id, -1 where it is not known; None: they have
            none. The same on all ranks.
    """

    known: range
    segments: NDArray[np.int32] | None = None


def start_at_means(embeddings: LocalTables, grown: Mapping[str, GrownTable]) -> None:
    """Set the rows after `known` of these tables to means over known rows. Collective.

    A row of a segment that has a known row starts at the segment's mean, any other at the table's; in a table without
    known rows all stay where they are. Means are taken in float64 over all ranks.
    """
    embeddings.invalidate()
    for name, table in sorted(grown.items()):
        means = _means(embeddings, name, table)
        if means is None:
            continue
        for matrix, block, rows, first in _blocks(embeddings, name):
            of_block = means.rows[:, block.columns.start : block.columns.stop].float()
            for part in _parts(rows, table.known.stop, rows.stop):
                positions = first + (part - rows.start) // rows.step
                place = _grown_places(table, part)
                place[~means.has_rows[place]] = 0
                values = encode(of_block[torch.from_numpy(place)], matrix.dtype)
                matrix[torch.from_numpy(positions).to(matrix.device)] = values.to(matrix.device)


@dataclass(frozen=True)
class _Means:
    """Means of the whole table (0) and of segment s (s + 1): float64 [segments + 1, dim]; True where a row is known."""

    rows: Tensor
    has_rows: NDArray[np.bool_]


def _means(embeddings: LocalTables, name: str, table: GrownTable) -> _Means | None:
    dim = embeddings.plan.by_name[name].dim
    segments = 0 if table.segments is None else int(table.segments.max(initial=-1)) + 1
    sums = torch.zeros(segments + 1, dim, dtype=torch.float64)
    counts = torch.zeros(segments + 1, dtype=torch.float64)
    is_chief = embeddings.collective.world.rank == 0
    for matrix, block, rows, first in _blocks(embeddings, name):
        if block.replicated and not is_chief:
            continue
        columns = slice(block.columns.start, block.columns.stop)
        for part in _parts(rows, table.known.start, table.known.stop):
            positions = torch.from_numpy(first + (part - rows.start) // rows.step)
            values = decode(matrix.index_select(0, positions.to(matrix.device))).cpu().double()
            place = torch.from_numpy(_grown_places(table, part))
            sums[0, columns] += values.sum(dim=0)
            if segments:
                of_segment = place > 0
                part_sums = torch.zeros(segments + 1, values.shape[1], dtype=torch.float64)
                part_sums.index_add_(0, place[of_segment], values[of_segment])
                sums[:, columns] += part_sums
            if columns.start == 0:
                counts[0] += len(part)
                counts += torch.bincount(place[place > 0], minlength=segments + 1).double()
    embeddings.collective.all_reduce_sum([sums, counts])
    if not counts[0]:
        return None
    return _Means(sums / counts.clamp(min=1)[:, None], (counts > 0).numpy())


def _parts(rows: range, first: int, stop: int) -> Iterator[NDArray[np.int64]]:
    """Yield the part of `rows` in [first, stop), at most _ROWS at a time: int64, ascending."""
    inside = rows[bisect_left(rows, first) : bisect_left(rows, stop)]
    for start in range(0, len(inside), _ROWS):
        part = inside[start : start + _ROWS]
        yield np.arange(part.start, part.stop, part.step)


def _grown_places(table: GrownTable, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each row's mean; 0: the mean of the table."""
    if table.segments is None:
        return np.zeros(len(rows), np.int64)
    return table.segments[rows].astype(np.int64) + 1


def _blocks(embeddings: LocalTables, name: str) -> Iterator[tuple[Tensor, Block, range, int]]:
    """Yield this rank's blocks of a table: (matrix, block, rows, position of the first row in the matrix)."""
    for fused in embeddings.layout.fused_tables:
        for block, rows, first in fused.local_blocks:
            if block.table == name:
                yield embeddings.weights[fused.number], block, rows, first
