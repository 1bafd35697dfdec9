"""Types of the columns of ORC and Avro files, of which Spark reads a folder by one schema.

Where a column's type differs by file, Spark ends with a trace, or in a task of a later stage. So types are compared
before: a file's footer or header is read, and no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import pyarrow as pa

from headrace.errors import UserError
from headrace.lake.source_tables.snapshot import READERS, TableFile
from headrace.storage import Location


def check_same_types(files: Sequence[TableFile], form: str) -> None:
    """Compare the types of columns, and of fields within, of all files that have them.

    Files that cannot be opened here are left to Spark.

    Args:
        files: data files.
        form: orc or avro.

    Raises:
        UserError: a column has two types; names it with both files and types.
    """
    with ThreadPoolExecutor(READERS) as pool:
        types = list(pool.map(lambda f: _types(f.path, f.identity, form), files))
    first: dict[str, tuple[str, Location]] = {}
    for file, of_file in zip(files, types, strict=True):
        for column, type_ in of_file.items():
            earlier_type, earlier_file = first.setdefault(column, (type_, file.path))
            if earlier_type != type_:
                raise UserError(
                    f"source: column '{column}' is {earlier_type} in {earlier_file} and {type_} in {file.path}, and "
                    f"a folder of {form} files has one type for each column: write one of them again, or the folder as "
                    f"Parquet, whose files may differ"
                )


@lru_cache(maxsize=1 << 16)
def _types(path: Location, identity: str, form: str) -> Mapping[str, str]:
    """Return the type of each column and field of a file by its path, such as `user.id` or `tags[]`."""
    del identity  # the file does not change while it stays the same
    column_types: dict[str, str] = {}
    # Modules are imported late: only such folders need them.
    with path.open() as stream:
        if form == "orc":
            from pyarrow import orc

            try:
                schema = orc.ORCFile(pa.PythonFile(stream, "r")).schema
            except (pa.ArrowException, OSError):
                return {}
            for field in schema:
                _add_arrow(field.type, field.name, column_types)
            return column_types
        from fastavro import reader

        try:
            written: Any = reader(stream).writer_schema
        except (ValueError, EOFError, KeyError):
            return {}
    for field in written.get("fields", ()) if isinstance(written, Mapping) else ():
        _add_avro(field["type"], field["name"], column_types)
    return column_types


def _add_arrow(type_: pa.DataType, path: str, column_types: dict[str, str]) -> None:
    if pa.types.is_struct(type_):
        column_types[path] = "struct"
        for field in type_:
            _add_arrow(field.type, f"{path}.{field.name}", column_types)
    elif pa.types.is_list(type_):
        column_types[path] = "list"
        _add_arrow(type_.value_type, f"{path}[]", column_types)
    elif pa.types.is_map(type_):
        column_types[path] = "map"
        _add_arrow(type_.key_type, f"{path}[key]", column_types)
        _add_arrow(type_.item_type, f"{path}[value]", column_types)
    elif pa.types.is_decimal(type_):
        # Spark takes the largest number of digits.
        column_types[path] = f"decimal with {type_.scale} digits behind the point"
    else:
        column_types[path] = str(type_)


def _add_avro(type_: Any, path: str, column_types: dict[str, str]) -> None:
    if isinstance(type_, list):
        types = [t for t in type_ if t != "null"]
        if len(types) == 1:
            _add_avro(types[0], path, column_types)
        elif types:  # null alone has the type of whatever others have
            column_types[path] = "a union"
        return
    kind = type_["type"] if isinstance(type_, Mapping) else str(type_)
    if kind == "record":
        column_types[path] = "record"
        for field in type_["fields"]:
            _add_avro(field["type"], f"{path}.{field['name']}", column_types)
    elif kind == "array":
        column_types[path] = "array"
        _add_avro(type_["items"], f"{path}[]", column_types)
    elif kind == "map":
        column_types[path] = "map"
        _add_avro(type_["values"], f"{path}[value]", column_types)
    elif isinstance(type_, Mapping) and type_.get("logicalType") == "decimal":
        column_types[path] = f"decimal({type_['precision']},{type_.get('scale', 0)})"
    elif isinstance(type_, Mapping) and "logicalType" in type_:
        column_types[path] = f"{kind} ({type_['logicalType']})"
    elif kind != "null":
        column_types[path] = str(kind)
