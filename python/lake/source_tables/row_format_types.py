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
            other, path = first.setdefault(column, (type_, file.path))
            if other != type_:
                raise UserError(
                    f"source: column '{column}' is {other} in {path} and {type_} in {file.path}, and a folder of "
                    f"{form} files has one type for each column: write one of them again, or the "
                    f"folder as Parquet, whose files may differ"
                )


@lru_cache(maxsize=1 << 16)
def _types(path: Location, identity: str, form: str) -> Mapping[str, str]:
    """Return the type of each column and field of a file by its path, such as `user.id` or `tags[]`."""
    del identity  # the file does not change while it stays the same
    found: dict[str, str] = {}
    # Modules are imported late: only such folders need them.
    with path.open() as stream:
        if form == "orc":
            from pyarrow import orc

            try:
                schema = orc.ORCFile(pa.PythonFile(stream, "r")).schema
            except (pa.ArrowException, OSError):
                return {}
            for field in schema:
                _add_arrow(field.type, field.name, found)
            return found
        from fastavro import reader

        try:
            written: Any = reader(stream).writer_schema
        except (ValueError, EOFError, KeyError):
            return {}
    for one in written.get("fields", ()) if isinstance(written, Mapping) else ():
        _add_avro(one["type"], one["name"], found)
    return found


def _add_arrow(type_: pa.DataType, path: str, found: dict[str, str]) -> None:
    if pa.types.is_struct(type_):
        found[path] = "struct"
        for field in type_:
            _add_arrow(field.type, f"{path}.{field.name}", found)
    elif pa.types.is_list(type_):
        found[path] = "list"
        _add_arrow(type_.value_type, f"{path}[]", found)
    elif pa.types.is_map(type_):
        found[path] = "map"
        _add_arrow(type_.key_type, f"{path}[key]", found)
        _add_arrow(type_.item_type, f"{path}[value]", found)
    elif pa.types.is_decimal(type_):
        # Spark takes the largest number of digits.
        found[path] = f"decimal with {type_.scale} digits behind the point"
    else:
        found[path] = str(type_)


def _add_avro(type_: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(type_, list):
        types = [t for t in type_ if t != "null"]
        if len(types) == 1:
            _add_avro(types[0], path, found)
        elif types:  # null alone has the type of whatever others have
            found[path] = "a union"
        return
    kind = type_["type"] if isinstance(type_, Mapping) else str(type_)
    if kind == "record":
        found[path] = "record"
        for field in type_["fields"]:
            _add_avro(field["type"], f"{path}.{field['name']}", found)
    elif kind == "array":
        found[path] = "array"
        _add_avro(type_["items"], f"{path}[]", found)
    elif kind == "map":
        found[path] = "map"
        _add_avro(type_["values"], f"{path}[value]", found)
    elif isinstance(type_, Mapping) and type_.get("logicalType") == "decimal":
        found[path] = f"decimal({type_['precision']},{type_.get('scale', 0)})"
    elif isinstance(type_, Mapping) and "logicalType" in type_:
        found[path] = f"{kind} ({type_['logicalType']})"
    elif kind != "null":
        found[path] = str(kind)
