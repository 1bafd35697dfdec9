"""Joins over Arrow tables with external tables, which pyarrow reads in the types that operators want."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from headrace.errors import UserError
from headrace.features.table_ops.base import ExternalTable
from headrace.features.table_ops.joins import JoinAsof, JoinExternal, refuse_duplicates
from headrace.features.table_ops.preparation import ExternalReader, _check_type
from headrace.features.types import ValueType
from headrace.lake.delta.log import DeltaLog
from tests.arrow_table_ops.context import ArrowTableContext
from tests.arrow_table_ops.windows import I64, codes_of, column_array, micros_of, newest_at, replaced, take


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


def join_external(op: JoinExternal, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    other_keys, other_rows = list(op.keys.values()), context.read(op.external(context.schema))
    n, m = table.num_rows, other_rows.num_rows
    key_columns = [_together(column_array(table, a), column_array(other_rows, b)) for a, b in op.keys.items()]
    codes = codes_of(key_columns, n + m)
    event_codes, other_codes = codes[:n], codes[n:]
    rows = np.flatnonzero(other_codes >= 0)
    if op.on_duplicate == "first":
        ranks = [_rank(column_array(other_rows, name.removeprefix("-")), name.startswith("-")) for name in op.order]
        rows = rows[np.lexsort((*(r[rows] for r in reversed(ranks)), other_codes[rows]))]
        first = np.concatenate([np.ones(min(1, len(rows)), bool), other_codes[rows][1:] != other_codes[rows][:-1]])
        leader = rows[np.maximum.accumulate(np.where(first, np.arange(len(rows)), 0))] if len(rows) else rows
        rows = rows[np.all([r[rows] == r[leader] for r in ranks], axis=0)] if len(rows) else rows
    _, counts = np.unique(other_codes[rows], return_counts=True)
    refuse_duplicates(op.description, ", ".join(other_keys), int((counts > 1).sum()), int(counts[counts > 1].sum()))
    row_of_code = np.full(int(max(codes.max(initial=-1), 0)) + 1, -1, np.int64)
    row_of_code[other_codes[rows]] = rows
    matched_rows = np.where(event_codes >= 0, row_of_code[np.maximum(event_codes, 0)], -1)
    out = table
    for added, name in zip(op.added(context.schema), op.add, strict=True):
        values_ = column_array(other_rows, name)
        if not m:
            out = replaced(out, added, pa.nulls(n, values_.type))
        else:
            out = replaced(out, added, take(values_, matched_rows, matched_rows >= 0))
    return out


def join_asof(op: JoinAsof, table: pa.Table, context: ArrowTableContext) -> pa.Table:
    schema = context.schema
    time = schema.needs_time()
    external = op.external(schema)
    assert external is not None
    assert op.valid_from is not None
    other_rows, needed = context.read(external), [*op.keys.values(), op.valid_from]
    n, m = table.num_rows, other_rows.num_rows
    key_columns = [
        pa.concat_arrays([column_array(table, a), column_array(other_rows, b).cast(column_array(table, a).type)])
        for a, b in op.keys.items()
    ]
    codes = codes_of(key_columns, n + m)
    t, timed = micros_of(column_array(table, time), schema.types[time])
    since, valid = micros_of(column_array(other_rows, op.valid_from), external.columns[op.valid_from])
    group, its = np.where(timed, codes[:n], -1), codes[n:]
    rows = np.flatnonzero((its >= 0) & valid)
    rows = rows[np.lexsort((since[rows], its[rows]))]
    g, s = its[rows], since[rows]
    _, counts = np.unique(np.stack([g, s]), axis=1, return_counts=True)
    refuse_duplicates(op.description, ", ".join(needed), int((counts > 1).sum()), int(counts[counts > 1].sum()))
    versions = newest_at(group, t, g, s, op.at == "upto")
    if op._tolerance is not None and len(s):
        versions = np.where((versions >= 0) & (s[np.maximum(versions, 0)] > t - op._tolerance), versions, -1)
    out = table
    for added, name in zip(op.added(context.schema), op.add, strict=True):
        x = column_array(other_rows, name)
        if not len(rows):
            out = replaced(out, added, pa.nulls(n, x.type))
        else:
            out = replaced(out, added, take(x, rows[np.maximum(versions, 0)], versions >= 0))
    return out


def _together(a: pa.Array, b: pa.Array) -> pa.Array:
    return pa.concat_arrays([a, b.cast(a.type)])


def _rank(x: pa.Array, descending: bool) -> I64:
    """Numbers that sort like the values, nulls as the smallest."""
    encoded = x.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    out = np.where(codes < 0, -1, rank[np.maximum(codes, 0)]) if len(order) else np.full(len(x), -1, np.int64)
    return -out if descending else out
