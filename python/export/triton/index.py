"""An index of items' vectors as a model of Triton's Python back end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.export.record import Record
from headrace.export.triton.config import ModelConfig, Tensor
from headrace.export.triton.options import Options
from headrace.export.triton.parts import put_backend
from headrace.export.triton.publish import Model
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location

#: Items that a cell of Faiss's inverted lists is for at least, and cells that a search looks at.
_ITEMS_OF_A_CELL, _PROBES = 64, 16


def item_keys(workflow: FittedWorkflow, exported: Location, record: Record) -> tuple[list[str], NDArray[np.float32]]:
    """All items of an export's vocabulary: their values as texts, and their vectors [items, D] (mapped)."""
    items = record.items
    assert items is not None
    table = workflow.vocabularies[items.vocabulary].table.sort_by("code")
    codes = table.column("code").to_numpy()
    vectors = np.load((exported / items.file).local_path(), mmap_mode="r")
    if len(codes) and not items.first_code <= int(codes[0]) <= int(codes[-1]) < len(vectors):
        raise UserError(f"{exported / items.file} has {len(vectors)} rows, and codes go to {int(codes[-1])}")
    return table.column("value").to_pylist(), vectors[codes]


def index_model(name: str, keys: list[str], vectors: NDArray[np.float32], options: Options) -> Model:
    """Vectors `query_vector` [rows, D] to `item` (texts), `item_row` and `item_score` [rows, found], best first.

    Where there are fewer items they end with "", -1 and minus infinity.

    Args:
        name: of the model.
        keys: of items.
        vectors: of items, float32 [items, D].
        options: how they are searched.
    """
    exact = options.index == "exact"
    said = {"found": str(options.found), "index": options.index} | ({} if exact else {"probes": str(_PROBES)})
    k = (options.found,)
    config = ModelConfig(
        name,
        (Tensor("query_vector", "float32", (vectors.shape[1],)),),
        (Tensor("item", "object", k), Tensor("item_row", "int64", k), Tensor("item_score", "float32", k)),
        options.batching,
        "python",
        parameters=said,
        kind="KIND_CPU",
    )

    def fill(to: Location) -> None:
        put_backend(to, "index")
        save_array(to / "vectors.npy", np.ascontiguousarray(vectors, np.float32))
        save_array(to / "keys.npy", np.array(keys, np.str_))
        if not exact:
            _write_faiss(to / "index.faiss", np.ascontiguousarray(vectors, np.float32))

    return Model(config, fill)


def save_array(file: Location, values: NDArray[Any]) -> None:
    """NumPy's format, without pickle: texts as fixed-width arrays."""
    with file.new_file() as path, open(path, "wb") as out:
        np.save(out, values, allow_pickle=False)


def _write_faiss(file: Location, vectors: NDArray[np.float32]) -> None:
    """Inverted lists of whole vectors by their inner products."""
    import faiss

    items, width = vectors.shape
    cells = max(1, min(int(2 * math.sqrt(items)), items // _ITEMS_OF_A_CELL))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    with file.new_file() as path:
        faiss.write_index(index, str(path))
