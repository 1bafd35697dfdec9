"""Which Delta tables this package reads: the features that a table asks of its readers.

PROTOCOL.md of delta-io/delta: a reader that does not know a feature of `readerFeatures` must
not read the table, for it would read wrong rows without noticing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UserError
from headrace.storage import Location

#: Reader features that are understood. `deletionVectors`: counted (headrace.lake.delta.log.DataFile); `columnMapping`:
#: only where its mode is none; `typeWidening`: whoever reads a data file casts its values to the table's types.
READER_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck"}
)
#: Reader features that say nothing of which files are live: whoever asks Spark for the rows may list the files.
_OF_ROWS = frozenset({"typeWidening-preview", "variantType", "variantType-preview", "variantShredding-preview"})
_MAPPING = "delta.columnMapping.mode"


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
