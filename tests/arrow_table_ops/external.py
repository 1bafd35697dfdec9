"""ExternalTable tables read by pyarrow, in the types that operators want."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.features.table_ops.base import ExternalTable
from headrace.features.table_ops.external import ExternalReader, _check_type
from headrace.features.types import ValueType
from headrace.lake.delta.log import DeltaLog


def read(reader: ExternalReader, table: ExternalTable) -> pa.Table:
    """Return the columns of a table that a join reads, as `ExternalReader.spark` does."""
    path = reader.path(table)
    reader._check(table)
    if table.format == "delta":
        log = DeltaLog(path)
        version = int(reader._pinned[table]) if table in reader._pinned else log.version
        files = log.files(version) if version is not None else None
        if files is None:
            raise UserError(f"{path}: version {version} of this Delta table is not there any more")
        if any(f.partition for f in files):
            raise UserError(f"{path}: a partitioned Delta table needs Spark to be read")
        loaded = pa.concat_tables([pq.read_table(f.path) for f in files], promote_options="default")
    elif table.format == "csv":
        strings = pacsv.ConvertOptions(
            column_types={n: pa.string() for n in table.columns}, strings_can_be_null=True, null_values=[""]
        )
        paths = sorted((path / "*.csv").glob()) if path.is_dir() else [path]
        loaded = pa.concat_tables([pacsv.read_csv(p, convert_options=strings) for p in paths])
    else:
        loaded = pads.dataset(path.local_path(), format="parquet").to_table()
    arrays = []
    for name, type_ in table.columns.items():
        column_names = loaded.schema.names
        _check_type(table, name, type_, str(type_) if name in column_names else None, column_names)
        x = loaded.column(name)
        try:
            arrays.append(_parsed(x, type_) if table.format == "csv" else x.cast(type_.arrow))
        except pa.ArrowException as e:
            raise UserError(f"{path}: column '{name}' cannot be read as {type_}: {e}") from None
    return pa.table(arrays, list(table.columns))


def _parsed(x: Any, type_: ValueType) -> Any:
    """Texts as Spark casts them."""
    if type_.element == "timestamp":
        return (
            pc.strptime(x, format="%Y-%m-%d %H:%M:%S", unit="us")
            .cast(pa.timestamp("us"))
            .cast(pa.int64())
            .cast(type_.arrow)
        )
    return x.cast(type_.arrow)
