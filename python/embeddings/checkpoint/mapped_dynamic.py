"""Saved tables of raw ids as files of this host's disk that all processes map.

    table-0.json   ids of each part
    table-0.ids    int64, ascending in each part
    table-0.rows   as they were saved, in the order of the ids

A part is what one rank saved. Files are copied piece by piece: a saved table may be larger than the memory.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from headrace.embeddings.checkpoint.dynamic import saved_files
from headrace.embeddings.checkpoint.tensors import PIECE_BYTES, check_file, load_tensors
from headrace.embeddings.dynamic.mapped_rows import MappedRows, SortedIds
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.storage.mapped import mapped_matrix
from headrace.storage import Location
from headrace.world import World


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
                of_ids, of_rows = file.get_slice("ids"), file.get_slice("weight")
                count = of_ids.get_shape()[0]
                step = max(1, PIECE_BYTES // (8 * max(1, spec.dim)))
                last = None
                begins = ids.tell(), rows.tell()
                for start in range(0, count, step):
                    some, vectors = of_ids[start : start + step], of_rows[start : start + step]
                    numbers = some.numpy()
                    if (last is not None and numbers[0] <= last) or (numbers[1:] <= numbers[:-1]).any():
                        break
                    last, dtype = numbers[-1], str(vectors.dtype).removeprefix("torch.")
                    ids.write(numbers.tobytes())
                    rows.write(_bytes(vectors))
                else:
                    counts.append(count)
                    continue
            # A save whose ids are in no order: sorted in memory.
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
    """The table of `write_mapped`, mapped."""
    said = json.loads((folder / f"table-{number}.json").read_text())
    count = sum(said["parts"])
    ids = np.empty(0, np.int64)
    if count:
        ids = np.asarray(np.memmap((folder / f"table-{number}.ids").local_path(), np.int64, "r", shape=(count,)))
    weight = mapped_matrix(folder / f"table-{number}.rows", count, spec.dim, getattr(torch, said["dtype"]))
    return MappedRows(spec, World(0, 1), SortedIds(ids, said["parts"]), weight)


def _bytes(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
