"""Reading a dataset back, row by row in plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataset.batches import Batch
from headrace.schema import DatasetSchema, Kind


def read_padded(files: Iterable[Path], schema: DatasetSchema) -> pd.DataFrame:
    """All rows of Parquet files with the columns of a batch: a list as `length` columns, 0 behind its end."""
    return padded(pa.concat_tables([pq.read_table(f) for f in files]), schema)


def padded(table: pa.Table, schema: DatasetSchema) -> pd.DataFrame:
    """The same of a table."""
    out = {}
    for f in schema.features:
        column = table.column(f.name)
        if not f.is_list:
            out[f.name] = column.to_pandas()
            continue
        rows = column.to_pylist()
        assert all(len(r) <= f.length and r[-1:] != [0] for r in rows), f.name
        for i, name in enumerate(f.physical):
            out[name] = pd.Series(np.array([r[i] if i < len(r) else 0 for r in rows], f.dtype))
    return pd.DataFrame(out)


def padded_codes(batch: Batch, schema: DatasetSchema) -> np.ndarray:
    """The categorical features of a batch side by side, a list as `length` columns, 0 behind its end: int64 [B, S]."""
    scalars, columns = iter(batch.codes.T), []
    for f in schema.of(Kind.CATEGORICAL):
        if not f.is_list:
            columns.append(next(scalars))
            continue
        lists = batch.lists[f.name]
        rows = [lists.values[a:b].tolist() for a, b in zip(lists.offsets, lists.offsets[1:], strict=False)]
        assert len(rows) == batch.rows
        columns += [np.array([r[i] if i < len(r) else 0 for r in rows], np.int64) for i in range(f.length)]
    return np.stack(columns, axis=1) if columns else np.empty((batch.rows, 0), np.int64)
