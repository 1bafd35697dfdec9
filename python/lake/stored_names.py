"""Fields of frames whose names differ in case alone where they are stored: Spark needs further names for them.

Spark's names have no case, so a frame has `Price` and `price` as `Price` and `price_2`. The metadata of the second
field say what it is called where it is stored.
"""

from __future__ import annotations

from pyspark.sql import types as T

from headrace.schema import unique_names

_STORED_NAME = "headrace.stored_name"


def stored_name(field: T.StructField) -> str:
    """Return what a field of a frame is called where it is stored."""
    return str((field.metadata or {}).get(_STORED_NAME, field.name))


def with_unique_names(type_: T.DataType) -> T.DataType:
    """Return a type whose structs have no two fields that differ in case alone; `stored_name` says what they were."""
    if isinstance(type_, T.ArrayType):
        return T.ArrayType(with_unique_names(type_.elementType), type_.containsNull)
    if isinstance(type_, T.MapType):
        return T.MapType(type_.keyType, with_unique_names(type_.valueType), type_.valueContainsNull)
    if not isinstance(type_, T.StructType):
        return type_
    fields = list[T.StructField]()
    for field, name in zip(type_.fields, unique_names(type_.names), strict=True):
        metadata = field.metadata if name == field.name else {**(field.metadata or {}), _STORED_NAME: field.name}
        fields.append(T.StructField(name, with_unique_names(field.dataType), field.nullable, metadata))
    return T.StructType(fields)


def has_twins(type_: T.DataType) -> bool:
    """Return whether a type, or one that it has within, has fields that differ in case alone."""
    if isinstance(type_, T.MapType):
        return has_twins(type_.valueType)
    if isinstance(type_, T.ArrayType):
        return has_twins(type_.elementType)
    if not isinstance(type_, T.StructType):
        return False
    return unique_names(type_.names) != type_.names or any(has_twins(f.dataType) for f in type_.fields)
