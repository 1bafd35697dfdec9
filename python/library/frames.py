"""Frames of other libraries: Spark, pandas, Polars and Arrow, told apart without importing any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import COLUMN_TYPES, ColumnType, TableColumn, decimal_digits
from headrace.errors import UserError, nearest
from headrace.features.types import declared

Library = Literal["spark", "pandas", "polars", "arrow"]

#: Types that a frame's columns may have; a binary one would have to be hashed first (what the lake does).
_COLUMN_TYPES = frozenset(COLUMN_TYPES) - {"binary"}
#: Spark's types that operators see as another one without loss.
_NARROW = {"tinyint": "int", "smallint": "int", "timestamp_ntz": "timestamp", "void": "string"}


def library_of(frame: Any) -> Library:
    """Return the library that a frame is of.

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
    """Return the named columns of a frame with their types, as a pipeline would declare them.

    Raises:
        UserError: a column is not there, is there twice, has values of several types, or has a type that no operator
            takes.
    """
    all_names = _names(frame)
    for name in names:
        if name not in all_names:
            known = list(dict.fromkeys(all_names))
            raise UserError(f"the frame has no column '{name}'{nearest(name, known)}; it has: {', '.join(known)}")
    types: dict[str, Any]
    if library_of(frame) == "spark":
        types = dict(frame.dtypes)
    else:
        types = {field.name: field.type for field in _table(frame, names).schema}
    columns = []
    for name in names:
        type_ = _spark_type(types[name]) if library_of(frame) == "spark" else _arrow_type(types[name])
        if type_ is None:
            raise UserError(
                f"column '{name}' is {types[name]}, which no operator takes; cast it to one of "
                f"{', '.join(sorted(_COLUMN_TYPES))}, or leave it out"
            )
        columns.append(TableColumn(name=name, type=type_))
    return tuple(columns)


def to_arrow(frame: Any, columns: Sequence[TableColumn]) -> pa.Table:
    """Return the columns of a pandas, Polars or Arrow frame in their types; pandas' missing values are null.

    Raises:
        UserError: a column is missing or there twice, or a value is not of its type.
    """
    table = _table(frame, [c.name for c in columns])
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
    """Return an Arrow table as a frame of the same library as `frame` (pandas: with its index)."""
    library = library_of(frame)
    if library == "pandas":
        converted = table.to_pandas()
        converted.index = frame.index
        return converted
    if library == "polars":
        return type(frame)(table)
    return table.combine_chunks().to_batches()[0] if isinstance(frame, pa.RecordBatch) and len(table) else table


def _names(frame: Any) -> list[str]:
    """Return the names of a frame's columns, those that are there twice twice."""
    if library_of(frame) == "arrow":
        return list(frame.schema.names)
    return [str(name) for name in frame.columns]


def _table(frame: Any, names: Sequence[str]) -> pa.Table:
    """Return those of the named columns that a frame of one host has: what the others hold does not matter.

    Raises:
        UserError: a column is there twice, or has values that are not of one type.
    """
    all_names = _names(frame)
    for name in names:
        if (count := all_names.count(name)) > 1:
            raise UserError(f"the frame has {count} columns '{name}': leave all but one out, or rename them")
    present = [name for name in dict.fromkeys(names) if name in all_names]
    library = library_of(frame)
    if library == "pandas":
        return pa.table([_of_pandas(frame.iloc[:, all_names.index(name)], name) for name in present], names=present)
    if library == "polars":
        return frame.select(present).to_arrow()
    table = pa.Table.from_batches([frame]) if isinstance(frame, pa.RecordBatch) else frame
    return table.select(present)


def _of_pandas(series: Any, name: str) -> pa.Array | pa.ChunkedArray:
    try:
        converted = pa.Table.from_pandas(series.to_frame("x"), preserve_index=False)
    except UnicodeEncodeError:
        raise UserError(
            f"column '{name}' has a text that is not Unicode (half a surrogate pair): replace it, for example by "
            f"text.encode('utf-8', 'replace').decode()"
        ) from None
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        kinds = ", ".join(sorted({type(value).__name__ for value in series.dropna()}))
        raise UserError(
            f"column '{name}' has values of the type {kinds}, which make no column of one type: cast it, for example "
            f"by .astype(str)"
        ) from None
    return converted.column(0)


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
