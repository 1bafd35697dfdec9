"""The vectors of all items of a model in retrieval form, as a file of NumPy's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.storage import DTYPES, decode, encode
from headrace.export.network import ExportedNetwork, is_sequence
from headrace.export.record import ITEM, Items
from headrace.export.table_files import Precision, stored_rows
from headrace.models.inputs import Inputs
from headrace.models.retrieval import further_item_features, item_feature
from headrace.storage import Location

FILE = "items.npy"
#: Items whose vectors are in memory at once.
_ITEMS = 1 << 16


def write_items(exported: ExportedNetwork, folder: Location, precision: Precision) -> Items | None:
    """Write the vectors of all codes: what the graph `item` gives of them, from rows of the same precision.

    None, and nothing is written, of models that have no such vectors: no retrieval form, items without a vocabulary, or
    with further features (the graph makes their vectors for who knows these).
    """
    if ITEM not in exported.graphs or further_item_features(exported.network):
        return None
    if exported.features[str(exported.network.item)].dynamic:
        return None
    feature = item_feature(exported.network, exported.model.schema, "an export of vectors")
    count, width = feature.cardinality or 0, 0
    stored = stored_rows(exported)
    with (folder / FILE).new_file() as path, open(path, "wb") as out:
        for first in range(0, count, _ITEMS):
            vectors = _vectors(exported, stored, range(first, min(first + _ITEMS, count)), precision)
            if not first:
                width = vectors.shape[1]
                header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
                np.lib.format.write_array_header_1_0(out, header)  # type: ignore[no-untyped-call]
            out.write(vectors.contiguous().numpy().tobytes())
    return Items(
        file=FILE,
        feature=feature.name,
        vocabulary=feature.vocabulary or feature.name,
        rows=count,
        columns=width,
        first_code=feature.first_code,
    )


def _vectors(exported: ExportedNetwork, stored: dict[str, Tensor], codes: range, precision: Precision) -> Tensor:
    """float32 [codes, D]."""
    network, item, rows = exported.network, str(exported.network.item), len(codes)
    found: dict[str, Tensor | JaggedTensor] = {}
    for w in exported.lookups:
        if w.feature == item and w.ids == "batch":
            some = decode(stored[exported.table_of(w)][codes.start : codes.stop])
            found[w.name] = some if precision == "fp32" else decode(encode(some, DTYPES[precision]))
        elif is_sequence(w):
            found[w.name] = JaggedTensor(torch.zeros(0, w.dim), torch.zeros(rows + 1, dtype=torch.int64))
        else:
            found[w.name] = torch.zeros(rows, w.dim)
    ids: dict[str, Tensor | JaggedTensor] = {item: torch.arange(codes.start, codes.stop)}
    inputs = exported.model.inputs
    given = Inputs(
        inputs, torch.zeros(rows, inputs.continuous_columns), torch.zeros(rows, 0, 0), embeddings=found, ids=ids
    )
    with torch.no_grad():
        vectors: Tensor = network.items(given)  # type: ignore[operator]
    return vectors.float()
