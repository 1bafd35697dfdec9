"""Features of Delta tables: those that a reader must know, and type widening.

PROTOCOL.md of delta-io/delta: a reader that does not know a feature of `readerFeatures` must not read the table, for it
would read wrong rows without noticing. With the feature `typeWidening` columns get a wider type while their data files
stay as they are: a reader casts the values of each file to the table's type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.schema import is_wider
from headrace.errors import UserError
from headrace.storage import Location

#: Supported reader features. `deletionVectors`: counted (headrace.lake.delta.log.DataFile); `columnMapping`: only where
#: its mode is none; `typeWidening`: readers of data files cast values to the table's types.
READER_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck"}
)
#: Reader features that do not affect which files are live: files may be listed where Spark reads the rows.
_OF_ROWS = frozenset({"typeWidening-preview", "variantType", "variantType-preview", "variantShredding-preview"})
_MAPPING = "delta.columnMapping.mode"
#: The feature, of readers and writers, and the property without which no writer changes a type.
FEATURE = "typeWidening"
PROPERTY = "delta.enableTypeWidening"
#: Key in a column's metadata: its earlier types, oldest first.
_CHANGES = "delta.typeChanges"
#: Delta's names of types -> Spark SQL's, where they differ.
_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
#: Features of writer versions below 7, each with the first version that requires it.
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


def check_listable(folder: Location, protocol: Mapping[str, Any] | None) -> None:
    """Refuse a table whose live files would be listed wrongly.

    Args:
        folder: of the table.
        protocol: its newest `protocol` action; None: of the first version.

    Raises:
        UserError: a reader version or feature that is not known.
    """
    protocol = dict(protocol or {})
    protocol["readerFeatures"] = sorted(set(protocol.get("readerFeatures") or ()) - _OF_ROWS)
    check_readable(folder, protocol, None)


def check_readable(
    folder: Location, protocol: Mapping[str, Any] | None, configuration: Mapping[str, str] | None
) -> None:
    """Refuse a table that would be read wrongly.

    Args:
        folder: of the table.
        protocol: its newest `protocol` action; None: of the first version.
        configuration: of its newest `metaData` action.

    Raises:
        UserError: a reader version or feature that is not known, or column mapping.
    """
    protocol, configuration = protocol or {}, configuration or {}
    version = protocol.get("minReaderVersion") or 1
    if version > 3:
        raise UserError(
            f"{folder}: this Delta table asks for reader version {version}, and headrace reads versions up to 3; write "
            f"its rows to a table of an older version"
        )
    unknown = sorted(set(protocol.get("readerFeatures") or ()) - READER_FEATURES)
    if unknown:
        raise UserError(
            f"{folder}: this Delta table uses features that headrace does not read: {', '.join(unknown)}; drop them "
            f"(ALTER TABLE delta.`{folder}` DROP FEATURE {unknown[0]}), or write its rows to a table without them"
        )
    mode = configuration.get(_MAPPING, "none")
    if version >= 2 and mode != "none":
        raise UserError(
            f"{folder}: this Delta table maps its columns' names ({_MAPPING} = {mode}), which headrace does not read; "
            f"set {_MAPPING} to none (ALTER TABLE delta.`{folder}` SET TBLPROPERTIES ('{_MAPPING}' = 'none')), or "
            f"write its rows to a table without it"
        )


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
