"""A look into the Parquet files of a day."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.publish.target import Key

if TYPE_CHECKING:
    import pyarrow as pa


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


def rows_having(files: Sequence[Path], column: str, keys: Sequence[Key]) -> int:
    """How many rows of some files have one of these keys in a column."""
    import pyarrow.parquet as pq

    return sum(without_keys(column, keys, pq.ParquetFile(file).read([column]))[1] for file in files)


def without_keys(column: str, keys: Sequence[Key], rows: pa.Table) -> tuple[pa.Table, int]:
    """Rows without those that have one of these keys in a column; and how many these were."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = rows.column(column)
    numbers = pa.types.is_integer(values.type)
    known = pa.array(keys, pa.int64() if numbers else pa.string())
    gone = pc.fill_null(pc.is_in(values.cast(known.type), value_set=known), False)
    count = int(pc.sum(gone).as_py() or 0)
    return (rows.filter(pc.invert(gone)), count) if count else (rows, 0)
