"""Frames of other libraries: Spark, pandas, Polars and Arrow, told apart without importing any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import UserError, nearest
from headrace.features.types import declared
from headrace.schema import COLUMN_TYPES, ColumnType, TableColumn, decimal_digits

Library = Literal["spark", "pandas", "polars", "arrow"]

#: Types that a frame's columns may have; a binary one would have to be hashed first (what the lake does).
_COLUMN_TYPES = frozenset(COLUMN_TYPES) - {"binary"}
#: Spark's types that operators see as another one without loss.
_NARROW = {"tinyint": "int", "smallint": "int", "timestamp_ntz": "timestamp", "void": "string"}


def library_of(frame: Any) -> Library:
    """Which library a frame is of.

    Raises:
        UserError: it is none of the four.
    """
    modules = {kind.__module__.partition(".")[0] for kind in type(frame).__mro__}
    if "pyspark" in modules:
        return "spark"
    if "pandas" in modules:
        return "pandas"
    if isinstance(frame, (pa.Table, pa.RecordBatch)):
        return "arrow"
    if hasattr(frame, "to_arrow"):
        return "polars"
    raise UserError(
        f"a frame is a Spark, pandas or Polars DataFrame or an Arrow table, not a {type(frame).__module__}."
        f"{type(frame).__qualname__}"
    )


def columns_of(frame: Any, names: Sequence[str]) -> tuple[TableColumn, ...]:
    """The named columns of a frame with their types, as a pipeline would declare them.

    Raises:
        UserError: a column is not there, or has a type that no operator takes.
    """
    there: dict[str, Any] = dict(frame.dtypes) if library_of(frame) == "spark" else _arrow_fields(frame)
    found = []
    for name in names:
        if name not in there:
            raise UserError(f"the frame has no column '{name}'{nearest(name, there)}; it has: {', '.join(there)}")
        type_ = _spark_type(there[name]) if library_of(frame) == "spark" else _arrow_type(there[name])
        if type_ is None:
            raise UserError(
                f"column '{name}' is {there[name]}, which no operator takes; cast it to one of "
                f"{', '.join(sorted(_COLUMN_TYPES))}, or leave it out"
            )
        found.append(TableColumn(name=name, type=type_))
    return tuple(found)


def to_arrow(frame: Any, columns: Sequence[TableColumn]) -> pa.Table:
    """The columns of a pandas, Polars or Arrow frame in their types; pandas' missing values are null.

    Raises:
        UserError: a column is missing, or a value is not of its type.
    """
    table = _table(frame)
    arrays = []
    for column in columns:
        if column.name not in table.column_names:
            raise UserError(f"the frame has no column '{column.name}'{nearest(column.name, table.column_names)}")
        array, type_ = table.column(column.name), declared(column).arrow
        try:
            if pa.types.is_timestamp(type_) and pa.types.is_timestamp(array.type):
                # Finer than microseconds: cut, as Spark does. Without a zone it is UTC.
                array = pc.floor_temporal(array, unit="microsecond").cast(pa.timestamp("us", array.type.tz))
                array = array if array.type.tz else array.cast(pa.int64())
            arrays.append(array.cast(type_))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
            raise UserError(f"column '{column.name}' cannot be read as {column.type}: {e}") from None
    return pa.table(arrays, names=[c.name for c in columns])


def like(frame: Any, table: pa.Table) -> Any:
    """An Arrow table as a frame of the same library as `frame` (pandas: with its index)."""
    library = library_of(frame)
    if library == "pandas":
        made = table.to_pandas()
        made.index = frame.index
        return made
    if library == "polars":
        return type(frame)(table)
    return table.combine_chunks().to_batches()[0] if isinstance(frame, pa.RecordBatch) and len(table) else table


def _table(frame: Any) -> pa.Table:
    library = library_of(frame)
    if library == "pandas":
        return pa.Table.from_pandas(frame, preserve_index=False)
    if library == "polars":
        return frame.to_arrow()
    return pa.Table.from_batches([frame]) if isinstance(frame, pa.RecordBatch) else frame


def _arrow_fields(frame: Any) -> dict[str, pa.DataType]:
    if library_of(frame) == "pandas":
        return {str(f.name): f.type for f in pa.Schema.from_pandas(frame, preserve_index=False)}
    return {f.name: f.type for f in (frame if library_of(frame) == "arrow" else frame.to_arrow()).schema}


def _spark_type(type_: str) -> ColumnType | None:
    if type_.startswith("array<"):
        element = _spark_type(type_[len("array<") : -1])
        return _known(f"array<{element}>")
    return _known(_NARROW.get(type_, type_))


def _arrow_type(type_: pa.DataType) -> ColumnType | None:
    if pa.types.is_dictionary(type_):
        return _arrow_type(type_.value_type)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        return _known(f"array<{_arrow_type(type_.value_type)}>")
    if pa.types.is_decimal(type_):
        return _known(f"decimal({type_.precision},{type_.scale})")
    tests: tuple[tuple[bool, ColumnType], ...] = (
        (pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_null(type_), "string"),
        (pa.types.is_boolean(type_), "boolean"),
        (pa.types.is_uint64(type_), "bigint"),  # beyond 2^63: the cast names the column
        (pa.types.is_integer(type_), "bigint" if type_ in (pa.int64(), pa.uint32()) else "int"),
        (pa.types.is_float64(type_), "double"),
        (pa.types.is_floating(type_), "float"),
        (pa.types.is_timestamp(type_), "timestamp"),
        (pa.types.is_date(type_), "date"),
    )
    return next((name for fits, name in tests if fits), None)


def _known(type_: str) -> ColumnType | None:
    return type_ if type_ in _COLUMN_TYPES or decimal_digits(type_) else None
