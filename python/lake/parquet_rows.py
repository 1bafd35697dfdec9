"""The rows of a data file that another writer may have made, on their way to another file."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

#: Codecs that pyarrow's writer names otherwise than its reader.
CODECS = {"uncompressed": "none"}


def row_groups(parquet: pq.ParquetFile, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """One after the other; of some columns, or (None) of all."""
    for group in range(parquet.num_row_groups):
        yield parquet.read_row_group(group, columns=columns, use_threads=False)


def schema_of(parquet: pq.ParquetFile) -> pa.Schema:
    """As the file has it; times of 96 bits, which are Spark's instants, as those of 64."""
    schema = parquet.schema_arrow
    wide = {
        c.name for c in (parquet.schema.column(i) for i in range(len(parquet.schema))) if c.physical_type == "INT96"
    }
    for i, column in enumerate(schema):
        if column.name in wide:
            schema = schema.set(i, column.with_type(pa.timestamp("us", "UTC")))
    return schema
