"""How much a Parquet file has of a column."""

from __future__ import annotations

import pyarrow.parquet as pq


def column_bytes(footer: pq.FileMetaData, column: str) -> list[int]:
    """Bytes of a column's pages before they were compressed, by row group; 0 where the file lacks it."""
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    chunks = ([group.column(i) for i in range(group.num_columns)] for group in groups)
    return [sum(c.total_uncompressed_size for c in of if c.path_in_schema == column) for of in chunks]
