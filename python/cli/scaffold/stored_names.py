"""Columns of data files whose names are others than those of the table: Delta's column mapping, Iceberg's field ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_PHYSICAL = "delta.columnMapping.physicalName"
#: Of a field that Parquet's reader makes.
_FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True)
class StoredColumn:
    """A column or field of a table."""

    name: str
    #: Its fields, and those of its elements, by `StoredNames`' keys.
    fields: StoredNames


@dataclass(frozen=True)
class StoredNames:
    """Column names in the table, by their names in data files."""

    #: By the name in data files, or the id.
    columns: Mapping[str | int, StoredColumn]

    @staticmethod
    def of_delta(type_: Any) -> StoredNames:
        """Return the names of a type in Delta's `schemaString`, by name."""
        if isinstance(type_, str):
            return StoredNames({})
        if type_["type"] in ("array", "map"):
            return StoredNames.of_delta(type_["elementType" if type_["type"] == "array" else "valueType"])
        return StoredNames(
            {
                (f.get("metadata") or {}).get(_PHYSICAL, f["name"]): StoredColumn(
                    f["name"], StoredNames.of_delta(f["type"])
                )
                for f in type_["fields"]
            }
        )

    @staticmethod
    def of_iceberg(type_: Any) -> StoredNames:
        """Return the names of a schema or type in Iceberg's metadata, by id."""
        if isinstance(type_, str):
            return StoredNames({})
        if type_["type"] in ("list", "map"):
            return StoredNames.of_iceberg(type_["element" if type_["type"] == "list" else "value"])
        return StoredNames(
            {int(f["id"]): StoredColumn(f["name"], StoredNames.of_iceberg(f["type"])) for f in type_["fields"]}
        )

    def rename(self, rows: pa.Table) -> pa.Table:
        """Rows of a data file under the table's names, without columns that the table no longer has."""
        columns = {}
        for field, values in zip(rows.schema, rows.columns, strict=True):
            column = self._stored_column(field)
            if column is not None:
                type_ = column.fields._type(field.type)
                # Only names are others.
                chunks = [chunk.view(type_) if type_ != field.type else chunk for chunk in values.chunks]
                columns[column.name] = pa.chunked_array(chunks, type_)
        return pa.table(columns)

    def _stored_column(self, field: pa.Field) -> StoredColumn | None:
        field_id = (field.metadata or {}).get(_FIELD_ID)
        # A file that another program has written has no ids.
        by_id = None if field_id is None else self.columns.get(int(field_id))
        return by_id or self.columns.get(field.name) or (None if field_id else self._named(field.name))

    def _named(self, name: str) -> StoredColumn | None:
        return next((c for c in self.columns.values() if c.name == name), None)

    def _type(self, type_: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(type_):
            fields = []
            for field in type_:
                column = self._stored_column(field)
                fields.append(field if column is None else pa.field(column.name, column.fields._type(field.type)))
            return pa.struct(fields)
        if pa.types.is_list(type_):
            return pa.list_(type_.value_field.with_type(self._type(type_.value_type)))
        return type_
