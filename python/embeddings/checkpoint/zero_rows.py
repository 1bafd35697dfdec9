"""Rows of a save made zero, optimizer states too: what a model has learned of some codes goes, the codes stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from headrace.embeddings.checkpoint.index import INDEX, WEIGHT, Chunk, read_index
from headrace.embeddings.checkpoint.tensors import FileRecord, load_tensors, save_tensors
from headrace.storage import Location

#: By table: the numbers of rows.
Rows = Mapping[str, Collection[int]]


def count_rows(folder: Location, rows: Rows) -> int:
    """How many of these rows a save has that are not zero already; of a save of changes, of its own rows.

    Raises:
        UserError: a file is missing or damaged.
    """
    index = read_index(folder)
    return sum(_zeroed(folder, record, index.chunks, rows)[1] for record in index.files)


def zero_rows(folder: Location, target: Location, rows: Rows) -> int:
    """Write a save again with some rows zero; files that have none of them are shared.

    Saves that lie upon it (`base`) lie upon the new one.

    Args:
        folder: of the save.
        target: of the new one: empty, its publication is the caller's.
        rows: which, by table; tables that the save lacks are passed over.

    Returns:
        how many rows were not zero.

    Raises:
        UserError: a file is missing or damaged.
    """
    index = read_index(folder)
    files, count = list[FileRecord](), 0
    for record in index.files:
        tensors, found = _zeroed(folder, record, index.chunks, rows)
        count += found
        if tensors is None:
            (target / record.name).copy_from(folder / record.name, share=True)
            files.append(record)
        else:
            files.append(save_tensors(target / record.name, tensors))
    known_as = index.saved_as or index.sha256
    new = index.model_copy(update={"files": tuple(files), "saved_as": known_as})
    new = new.model_copy(update={"sha256": new.digest()})
    (target / INDEX).put_text(new.model_dump_json(indent=1) + "\n")
    return count


def _zeroed(
    folder: Location, record: FileRecord, chunks: Collection[Chunk], rows: Rows
) -> tuple[dict[str, Tensor] | None, int]:
    """A file's tensors with the rows zero, None where they are already; and how many weights' rows were not."""
    mine = [c for c in chunks if c.file == record.name and _may_hold(c, rows.get(c.table, ()))]
    if not mine:
        return None, 0
    tensors, count, changed = load_tensors(folder, record), 0, False
    for chunk in mine:
        numbers = torch.arange(chunk.start, chunk.stop, chunk.stride)
        if chunk.rows_key is not None:
            numbers = tensors[chunk.rows_key]
        wanted = torch.tensor(sorted(rows[chunk.table]), dtype=torch.int64)
        values = tensors[chunk.key]
        places = torch.isin(numbers, wanted).nonzero().flatten()
        places = places[(values[places].contiguous().view(torch.uint8) != 0).flatten(1).any(dim=1)]
        if len(places):
            values[places] = 0
            changed = True
            count += len(places) if chunk.state == WEIGHT else 0
    return (tensors if changed else None), count


def _may_hold(chunk: Chunk, rows: Collection[int]) -> bool:
    return bool(rows) and (chunk.rows_key is not None or any(row in chunk.rows for row in rows))
