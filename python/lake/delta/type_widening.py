"""Columns of a Delta table that get a wider type while their data files stay as they are.

Written to the table feature `typeWidening` of Delta's protocol document (PROTOCOL.md of delta-io/delta): a reader casts
the values of each file to the table's type, and one that does not know the feature refuses the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.schema import is_wider

#: The feature, of readers and writers, and the property without which no writer changes a type.
FEATURE = "typeWidening"
PROPERTY = "delta.enableTypeWidening"
#: In a column's metadata: the types that it had, oldest first.
_CHANGES = "delta.typeChanges"
#: Delta's names of types that Spark's SQL writes otherwise.
_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
#: Features that writers of a version below 7 must know, by the version from which on.
_WRITER_FEATURES = (
    (2, "appendOnly"),
    (2, "invariants"),
    (3, "checkConstraints"),
    (4, "changeDataFeed"),
    (4, "generatedColumns"),
    (5, "columnMapping"),
    (6, "identityColumns"),
)
_LISTED_READERS, _LISTED_WRITERS = 3, 7


def sql_type(type_: Any) -> str:
    """Return the SQL name of a type of a Delta schema's JSON; of a map or a struct its JSON as text."""
    if isinstance(type_, Mapping) and type_.get("type") == "array":
        return f"array<{sql_type(type_['elementType'])}>"
    return _SQL_NAMES.get(str(type_), str(type_))


def widened_fields(fields: Sequence[Mapping[str, Any]], declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a table's columns with the wider types that a declaration gives some of them.

    Columns of the same, of a narrower or of another type, and undeclared ones, stay as they are.

    Args:
        fields: the table's columns, as the schema's JSON has them.
        declared: the columns that are about to be written, likewise.
    """
    declared_types = {str(f["name"]): f["type"] for f in declared}
    widened = []
    for field in fields:
        old, new = field["type"], declared_types.get(str(field["name"]), field["type"])
        if not is_wider(sql_type(new), sql_type(old)):
            widened.append(dict(field))
            continue
        change = {"toType": new, "fromType": old}
        if isinstance(old, Mapping):
            change = {"toType": new["elementType"], "fromType": old["elementType"], "fieldPath": "element"}
            new = {**old, "elementType": new["elementType"]}
        metadata = dict(field.get("metadata") or {})
        metadata[_CHANGES] = [*metadata.get(_CHANGES, ()), change]
        widened.append({**field, "type": new, "metadata": metadata})
    return widened


def with_feature(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's `protocol` action with the feature, and those that its older versions stood for by name."""
    readers = set(protocol.get("readerFeatures") or ())
    writers = set(protocol.get("writerFeatures") or ())
    if protocol["minReaderVersion"] == _LISTED_READERS - 1:
        readers.add("columnMapping")
        writers.add("columnMapping")
    if protocol["minWriterVersion"] < _LISTED_WRITERS:
        writers |= {name for version, name in _WRITER_FEATURES if version <= protocol["minWriterVersion"]}
    return {
        "minReaderVersion": _LISTED_READERS,
        "minWriterVersion": _LISTED_WRITERS,
        "readerFeatures": sorted(readers | {FEATURE}),
        "writerFeatures": sorted(writers | {FEATURE}),
    }
