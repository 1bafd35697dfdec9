"""The change data feed of a Delta table by its log: whether it is there for a range of versions.

Spark finds out only while it reads, in the middle of a plan, and says so in terms of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog, file_path
from headrace.storage import Location, missing

_ENABLED = "delta.enableChangeDataFeed"
_MAPPING = "delta.columnMapping.mode"
_PHYSICAL = "delta.columnMapping.physicalName"
_ANEW = "give the pipeline another name: it then begins with the table as it is"


def has_feed(metadata: Mapping[str, Any] | None) -> bool:
    """Whether commits under this `metaData` action are recorded in the feed."""
    return str(((metadata or {}).get("configuration") or {}).get(_ENABLED)).lower() == "true"


def check_feed(log: DeltaLog, shown: str, first: int, last: int) -> None:
    """Look whether the changes from version `first` to `last` can be read, under the columns of `last`.

    Args:
        log: of the table.
        shown: the table for a message.
        first: the first version.
        last: the last one.

    Raises:
        UserError: a commit or a file is gone, commits were not recorded, or columns have changed.
    """
    there = log.versions()
    gone = next((v for v in range(first, last + 1) if v not in there), None)
    metadata = None if gone is not None else log.metadata(first)
    if gone is not None or metadata is None:
        raise UserError(
            f"source.day.changes: the log of {shown} no longer has version {first if gone is None else gone}, which is "
            f"read for these days. Keep it for longer than features.window_days (delta.logRetentionDuration), and "
            f"{_ANEW}"
        )
    schemas = [(first, metadata["schemaString"])]
    for version in range(first, last + 1):
        files, changed = _changes(log, version)
        if changed is not None:
            metadata = changed
            schemas.append((version, metadata["schemaString"]))
        if not has_feed(metadata):
            raise UserError(
                f"source.day.changes: {shown} has no change data feed of version {version}. Record changes from now on "
                f"(ALTER TABLE ... SET TBLPROPERTIES ('{_ENABLED}' = 'true')), and {_ANEW}"
            )
        lost = missing(files)
        if lost is not None:
            raise UserError(
                f"source.day.changes: {lost}, which has changes of version {version} of {shown}, is gone: VACUUM has "
                f"removed it. Keep such files for longer than features.window_days (delta.deletedFileRetentionDuration "
                f"of the table), and {_ANEW}"
            )
    newest = log.version
    mapped = (metadata.get("configuration") or {}).get(_MAPPING, "none") != "none"
    if not mapped and newest is not None and newest > last:
        # Delta reads changes under the columns of today, where the table does not map them.
        _check_columns([schemas[-1], (newest, (log.metadata(newest) or metadata)["schemaString"])], shown)
    _check_columns(schemas, shown)


def _changes(log: DeltaLog, version: int) -> tuple[list[Location], Mapping[str, Any] | None]:
    """The files that have a commit's changes, and its `metaData` action."""
    recorded: list[Location] = []
    moved: list[Location] = []
    metadata = None
    for action in log.actions(version):
        metadata = action.get("metaData", metadata)
        if "cdc" in action:
            recorded.append(file_path(log.folder, action["cdc"]["path"]))
        for kind in ("add", "remove"):
            if kind in action and action[kind].get("dataChange", True):
                moved.append(file_path(log.folder, action[kind]["path"]))
    # Where a commit has files of changes, they are all of its changes.
    return recorded or moved, metadata


def _check_columns(schemas: list[tuple[int, str]], shown: str) -> None:
    """Refuse columns that are no more as they were: Delta cannot read changes across that."""
    now = dict(_columns(schemas[-1][1]))
    for version, text in schemas[:-1]:
        for name, was in _columns(text):
            if now.get(name) != was:
                raise UserError(
                    f"source.day.changes: column '{name}' of {shown} was renamed, dropped or given another type after "
                    f"version {version}, and changes across that cannot be read; {_ANEW}"
                )


def _columns(schema: str) -> Iterator[tuple[str, str]]:
    for field in json.loads(schema)["fields"]:
        yield field["name"], json.dumps([field["type"], (field.get("metadata") or {}).get(_PHYSICAL)])
