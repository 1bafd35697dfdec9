"""Schemas of ORC and Avro files, of which Spark reads a folder by one schema.

Where a column's type differs by file, Spark ends with a trace, or in a task of a later stage. So types are compared
before: a file's footer or header is read, and no row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa

from headrace.errors import UserError
from headrace.lake.tables.snapshot import READERS, TableFile
from headrace.schema import unique_names
from headrace.storage import Location, StoreError


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
        types = [schema.types for schema in pool.map(lambda f: read_schema(f.path, f.identity, form), files)]
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


#: First bytes of a file.
_MAGIC = {"orc": b"ORC", "avro": b"Obj\x01"}
_MOST_HEADER_BYTES = 64 << 20
#: What Arrow and fastavro raise for bytes that are no schema.
_NO_SCHEMA = (
    *(pa.ArrowException, OSError, EOFError),
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
)


@dataclass(frozen=True)
class FileSchema:
    """The schema that a file has in its footer or header."""

    #: The type of each column and field by its path, such as `user.id` or `tags[]`.
    types: Mapping[str, str] = field(default_factory=dict)
    #: The schema of an Avro file as it is written, JSON.
    text: str = ""
    #: Why it cannot be read here; None: it was read.
    fault: str | None = None
    #: Whether the file begins as its format does, so that Spark may read what Python does not.
    is_of_format: bool = True

    @property
    def has_twins(self) -> bool:
        """Return whether the names of two columns, or of two fields, differ in case alone."""
        return len({path.lower() for path in self.types}) < len(self.types)


@lru_cache(maxsize=1 << 16)
def read_schema(path: Location, identity: str, form: str) -> FileSchema:
    """Return the schema of an ORC or Avro file, which does not change while its identity does not."""
    del identity
    types: dict[str, str] = {}
    text = ""
    with path.open() as stream:
        is_of_format = stream.read(len(_MAGIC[form])) == _MAGIC[form]
        stream.seek(0)
        try:
            if form == "orc":
                _add_orc(stream, types)
            else:
                text = _add_avro_file(stream, types)
        except StoreError:
            raise
        except _NO_SCHEMA as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise
            return FileSchema({}, "", (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip("."), is_of_format)
    return FileSchema(types, text)


def _add_orc(stream: Any, column_types: dict[str, str]) -> None:
    from pyarrow import orc  # only such folders need it

    for column in orc.ORCFile(pa.PythonFile(stream, "r")).schema:
        _add_arrow(column.type, column.name, column_types)


@dataclass(frozen=True)
class _ShortReads:
    """A file of which a damaged length reads no more than a header may have."""

    stream: Any

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer than requested where that is more than `_MOST_HEADER_BYTES`."""
        data: bytes = self.stream.read(min(max(size, 0), _MOST_HEADER_BYTES))
        return data


def _add_avro_file(stream: Any, column_types: dict[str, str]) -> str:
    """Add the types of a file's columns; return its schema as it is written. Raises ValueError where it has none."""
    from fastavro import reader
    from fastavro.schema import SchemaParseException, UnknownType

    header: Any = _ShortReads(stream)
    try:
        file = reader(header)
    except (SchemaParseException, UnknownType) as e:
        raise ValueError(str(e)) from e
    written: Any = file.writer_schema
    for column in written.get("fields", ()) if isinstance(written, Mapping) else ():
        _add_avro(column["type"], column["name"], column_types)
    return str(file.metadata["avro.schema"])


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


def with_aliases(schema: str) -> str:
    """Return an Avro schema by which a reader finds fields that differ in case alone under names that do not.

    Args:
        schema: as a file has it, JSON.
    """
    return json.dumps(_aliased(json.loads(schema)))


def _aliased(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_aliased(branch) for branch in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _aliased(schema[key]) for key in ("type", "items", "values") if key in schema}
    if "fields" in schema:
        names = [field["name"] for field in schema["fields"]]
        inner["fields"] = [
            _aliased(field) | ({} if new == old else {"name": new, "aliases": [old]})
            for field, old, new in zip(schema["fields"], names, unique_names(names), strict=True)
        ]
    return {**schema, **inner}
