"""Single rows of saved tables: files are mapped, and the requested rows are copied.

    files = files_of(model / "embeddings", model / "dynamic", tables, raw)
    requested = {n: codes[f.may_have("user", codes)] for n, f in enumerate(files)}
    parts = [rows for n, f in enumerate(files) for rows in f.read("user", requested[n])]
    rows = assemble(tables["user"], parts)

A save of changed rows lies on top of others (`index.read_chain`): a row may be in several files, the newest counts. A
table that was saved by columns has a row's values in several files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.embeddings.checkpoint.dynamic import saved_files
from headrace.embeddings.checkpoint.index import WEIGHT, FileChunk, read_chain
from headrace.embeddings.checkpoint.tensors import FileRecord, check_file
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.layout import TableRows
from headrace.embeddings.raw_ids import owners
from headrace.embeddings.sharding_plan import Table
from headrace.embeddings.storage import DTYPES, convert, decode, stored_width
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
