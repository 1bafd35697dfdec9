"""A look into the Parquet files of a day."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def first_rows(files: Sequence[Path], ds: str, user: str, rows: int) -> list[dict[str, Any]]:
    """The first rows of the first file that has any, by key: column -> value, the day first.

    Args:
        files: of the day.
        ds: the day, where the files have no column of it.
        user: name of the user key.
        rows: how many.
    """
    import pyarrow.parquet as pq

    for file in files:
        table = pq.ParquetFile(file).read()
        if table.num_rows:
            found = table.sort_by([(user, "ascending"), ("rank", "ascending")]).slice(0, rows).to_pylist()
            return [{"ds": ds} | row for row in found]
    return []
