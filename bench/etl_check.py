"""Comparison of a peer's dataset with ours: the same values of numbers, the same values kept by categories.

The order of rows and the numbers of codes are each engine's own. So rows are compared as a bag, one by one: a peer's
codes are translated to ours by the vocabularies that it left, and the sums of a hash of each row's codes must agree,
which no order of the rows changes. Numbers are compared column by column, in their order: the engines' logarithms
differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.schema import FIRST_CODE
from headrace.udfs.xxhash64 import xxhash64_integers

#: Of normalised numbers, which are float32 of about unit size.
_TOLERANCE = 2e-5

Array = npt.NDArray[Any]


def differences(
    dataset: Path, peer: Path, vocabularies: Mapping[str, pa.Table], categories: Sequence[str], counts: Sequence[str]
) -> list[str]:
    """Return the differences between our dataset and a peer's, a line each; empty: there are none.

    Args:
        dataset: our dataset's folder, with `train` and `valid`.
        peer: the peer's, and `vocabulary/COLUMN.parquet` (value, code).
        vocabularies: ours by column: value, code.
    """
    faults, translate = [], {}
    for name in categories:
        vocabulary = vocabularies[name]
        peer_vocabulary = pq.read_table(peer / "vocabulary" / f"{name}.parquet", columns=["value", "code"])
        position = pc.index_in(
            peer_vocabulary.column("value").cast(pa.string()), vocabulary.column("value")
        ).combine_chunks()
        if peer_vocabulary.num_rows != vocabulary.num_rows or position.null_count:
            lacks = vocabulary.num_rows - peer_vocabulary.num_rows + position.null_count
            faults.append(
                f"{name}: of our {vocabulary.num_rows} values it lacks {lacks}, {position.null_count} are its own"
            )
            continue
        codes = peer_vocabulary.column("code").to_numpy()
        table = np.arange(max(codes.max(initial=0) + 1, FIRST_CODE), dtype=np.int64)
        table[codes] = vocabulary.column("code").to_numpy()[position.to_numpy()]
        translate[name] = table
    for split in ("train", "valid"):
        sums = [0, 0]
        sides = [sorted((folder / split).rglob("*.parquet")) for folder in (dataset, peer)]
        for side, paths in enumerate(sides):
            for path in paths:
                for batch in pq.ParquetFile(path).iter_batches(1 << 17, columns=[*translate, "label"]):
                    sums[side] += _bag(batch, translate if side else {}, list(translate))
        if (sums[0] - sums[1]) % 2**64:
            faults.append(f"{split}: rows have other codes or labels")
        for name in counts:
            a, b = (np.sort(pq.read_table(list(map(str, p)), columns=[name]).column(0).to_numpy()) for p in sides)
            if len(a) != len(b):
                faults.append(f"{split}.{name}: {len(b)} rows, ours has {len(a)}")
            elif len(a) and (worst := float(np.abs(a - b).max())) > _TOLERANCE:
                faults.append(f"{split}.{name}: numbers differ by {worst:g}")
    return faults


def _bag(batch: pa.RecordBatch, translate: Mapping[str, Array], names: Sequence[str]) -> int:
    """Return the sum, modulo 2**64, of a hash of each row's codes and label."""
    hashes = batch.column(batch.schema.get_field_index("label")).to_numpy().astype(np.int64)
    for name in names:
        codes = batch.column(batch.schema.get_field_index(name)).to_numpy()
        hashes = xxhash64_integers(translate[name][codes] if translate else codes.astype(np.int64), hashes)
    return int(hashes.view(np.uint64).sum(dtype=np.uint64))
