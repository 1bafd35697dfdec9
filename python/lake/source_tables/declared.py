"""Rows of a source table as the spec declares them: columns by name and type, day and identity."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import EpochUnit, Table, TableSource
from headrace.errors import UserError
from headrace.lake.source_tables.days import day_column
from headrace.lake.source_tables.snapshot import FILE, LINE, Snapshot
from headrace.lake.sources.frame import quoted
from headrace.schema import TableColumn

#: What a stored type may be declared as besides itself: each value stays what it is.
_WIDER: Mapping[str, tuple[str, ...]] = {
    "tinyint": ("smallint", "int", "bigint", "float", "double"),
    "smallint": ("int", "bigint", "float", "double"),
    "int": ("bigint", "double"),
    "float": ("double",),
    "array<tinyint>": ("array<int>", "array<bigint>"),
    "array<smallint>": ("array<int>", "array<bigint>"),
    "array<int>": ("array<bigint>", "array<double>"),
    "array<float>": ("array<double>",),
    "timestamp_ntz": ("timestamp",),
}
_EPOCH_TYPES = ("int", "bigint", "double")


@dataclass(frozen=True)
class StoredColumns:
    """How the table stores the declared columns."""

    #: Declared columns that it lacks.
    missing: frozenset[str]
    #: Whether rows have a file and a position there: else their keys tell them apart.
    positions: bool
    #: All its columns, name to type.
    types: Mapping[str, str]


def table_rows(
    spark: SparkSession, snapshot: Snapshot, table: Table, source: TableSource, days: Collection[str], ds: str
) -> tuple[DataFrame, StoredColumns]:
    """The rows of some days.

    Args:
        spark: the session.
        snapshot: of the table.
        table: declares columns and keys.
        source: says what a day is.
        days: all others are left out; of a table without days, the one day that all its rows are of.
        ds: of the run.

    Returns:
        the declared columns (null where the table lacks one), `_source_file`, `_source_line`, `ds`; and how they are
        stored.

    Raises:
        UserError: a column has a type that is not as declared; rows have no identity.
    """
    frame = snapshot.rows(spark, days if source.daily else None)
    texts = frozenset(snapshot.files[0].partition or ()) if snapshot.format != "delta" else frozenset()
    stored = stored_columns(frame, table, source, texts)
    there = {f.name.lower(): f for f in frame.schema.fields}
    declared = [_declared(c, there, source) for c in table.columns]
    day = day_column(frame, source) if source.daily else F.lit(ds)
    place = [F.col(FILE), F.col(LINE)] if stored.positions else _by_keys(table, source, there)
    rows = frame.select(*declared, place[0].alias(FILE), place[1].alias(LINE), day.alias("ds"))
    return (rows.where(F.col("ds").isin(sorted(days))) if source.daily else rows), stored


def stored_columns(frame: DataFrame, table: Table, source: TableSource, texts: Collection[str]) -> StoredColumns:
    """Compare a table's columns with the declaration.

    Args:
        frame: of the source table.
        table: declares.
        source: says what a day is.
        texts: partition columns that are there as text, whatever they mean; lower case.

    Raises:
        UserError: a type is not as declared and cannot be read as it.
    """
    there = {f.name.lower(): f for f in frame.schema.fields if f.name not in (FILE, LINE)}
    missing, faults = set(), []
    for column in table.columns:
        found = _found(column, there)
        if found is None:
            missing.add(column.name)
            continue
        kind = found[1].simpleString()
        if not (_readable(kind, column, source) or column.steps[0].lower() in texts):
            faults.append(f"column '{column.name}' is declared {column.type}, but {source.shown} has it as {kind}")
    if faults:
        raise UserError(
            "\n".join(faults) + "\nDeclare the table's own types in table.columns (or a view of the table with other "
            "ones); numbers since 1970 are named in source.timestamps"
        )
    types = {f.name: f.dataType.simpleString() for f in there.values()}
    return StoredColumns(frozenset(missing), FILE in frame.columns, types)


def _readable(kind: str, column: TableColumn, source: TableSource) -> bool:
    if column.name in source.timestamps:
        return kind in _EPOCH_TYPES
    return kind == column.type or column.type in _WIDER.get(kind, ())


def _found(column: TableColumn, there: Mapping[str, T.StructField]) -> tuple[Column, T.DataType] | None:
    """A declared column of the table, by its path, and its type; None where there is none."""
    top, *inner = column.steps
    if top.lower() not in there:
        return None
    field = there[top.lower()]
    value, type_ = F.col(quoted([field.name])[0]), field.dataType
    for step in inner:
        if isinstance(type_, T.StructType):
            nested = next((f for f in type_.fields if f.name.lower() == step.lower()), None)
            if nested is None:
                return None
            value, type_ = value.getField(nested.name), nested.dataType
        elif isinstance(type_, T.MapType):
            value, type_ = F.try_element_at(value, F.lit(step)), type_.valueType
        else:
            return None
    return value, type_


def _declared(column: TableColumn, there: Mapping[str, T.StructField], source: TableSource) -> Column:
    found = _found(column, there)
    if found is None:
        return F.lit(None).cast(column.stored_type).alias(column.name)
    value, kind = found[0], found[1].simpleString()
    if column.name in source.timestamps:
        value = _since_1970(value, source.timestamps[column.name])
    elif kind == "timestamp_ntz" and column.type == "timestamp":
        value = value.cast("timestamp")
        value = value if source.timezone == "UTC" else F.to_utc_timestamp(value, source.timezone)
    elif column.type == "binary":
        value = F.sha2(value, 256)
    elif kind != column.type:
        value = value.cast(column.type)
    return value.alias(column.name)


def _since_1970(value: Column, unit: EpochUnit) -> Column:
    factor = 1_000_000 if unit == "epoch_seconds" else 1_000
    return F.timestamp_micros((value * F.lit(factor)).cast("bigint"))


def _by_keys(table: Table, source: TableSource, there: Mapping[str, T.StructField]) -> list[Column]:
    """`_source_file`, `_source_line` where the format has no positions: the keys, and a hash of the row."""
    if not table.keys:
        raise UserError(
            f"source: rows of {source.shown} have no positions that Spark gives, so it takes their keys to tell them "
            f"apart: declare table.keys (a Delta table has positions with 'delta.enableDeletionVectors' = 'true')"
        )
    found = {c.name: _found(c, there) for c in table.columns}
    values = {name: value[0] for name, value in found.items() if value is not None}
    keys = [values[k].alias(k) for k in table.keys if k in values]
    return [F.to_json(F.struct(*keys)), F.xxhash64(*values.values())]
