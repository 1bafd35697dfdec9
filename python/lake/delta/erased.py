"""Data files of a table that were written again without some rows, for readers of older versions.

Versions of a Delta table name files, and a file with rows that must go has to go itself. What took its place is kept
beside the log (`_delta_log/_headrace_erased.json`), and DeltaLog gives that file where a version names the other one:
so manifests, which pin versions, stand. Another reader of an older version finds its files gone, as after a VACUUM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import UserError
from headrace.storage import LeaseLost, Location
from headrace.storage.own_records import known_keys

_MARK = "headrace.erasure"
#: Key in an `add` action: rows of the replaced file that were erased.
ROWS = "headrace.erased"


@dataclass(frozen=True)
class Replacement:
    """A data file that took the place of another one."""

    #: The `add` action of the new file, which may be without rows.
    add: dict[str, Any]
    #: Number of erased rows.
    rows: int


def replacements(table: Location) -> dict[str, Replacement]:
    """Return the replacement of each file that was written again, by its path in the log.

    Raises:
        UserError: the record is damaged, or of a newer release.
    """
    try:
        text = _file(table).read_text()
    except FileNotFoundError:
        return {}
    try:
        return {
            path: Replacement(**known_keys(replacement, ("add", "rows"), str(_file(table))))
            for path, replacement in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(
            f"{_file(table)} is damaged: older versions of the table cannot be read. Remove it to read the newest "
            f"version alone"
        ) from e


def save_replacements(table: Location, record: Mapping[str, Replacement], previous: Mapping[str, Replacement]) -> None:
    """Replace the record in one step, on the condition that it is the one that was read before.

    Raises:
        LeaseLost: another process has written it since.
    """
    file = _file(table)
    tagged = file.read_tagged()
    if replacements(table) != previous or not file.put_if(
        _text(record).encode(), None if tagged is None else tagged[1]
    ):
        raise LeaseLost(f"{file} was written by another run since this one read it; run again")


def _text(record: Mapping[str, Replacement]) -> str:
    return json.dumps({path: asdict(replacement) for path, replacement in record.items()}) + "\n"


def replaced(add: Mapping[str, Any], record: Mapping[str, Replacement]) -> Mapping[str, Any]:
    """Return the `add` action in force for that of a version."""
    replacement = record.get(add["path"])
    # An action with a deletion vector has other rows of the file than the replacement.
    return add if replacement is None or add.get("deletionVector") else {**replacement.add, ROWS: replacement.rows}


def erasure_text(request: str, rows: Mapping[str, int]) -> str:
    """Return the userMetadata of the commit by which rows of a request go; `rows`: how many, by partition `ds`."""
    return json.dumps({_MARK: {"request": request, "rows": dict(rows)}})


def erased_rows(user_metadata: str | None) -> Mapping[str, int] | None:
    """Return the rows that a commit of `erase` has removed, by day; None of another commit.

    Raises:
        UserError: a newer release has made it.
    """
    content = said_by(_MARK, user_metadata)
    if content is None:
        return None
    shown_record = f"the record of the erasure {content.get('request')} in a table's log"
    return dict(known_keys(content, ("request", "rows"), shown_record)["rows"])


def _file(table: Location) -> Location:
    return table / "_delta_log" / "_headrace_erased.json"


def said_by(mark: str, user_metadata: str | None) -> Mapping[str, Any] | None:
    """Return what a commit's userMetadata holds below `mark`, None of another commit."""
    if user_metadata is None or mark not in user_metadata:
        return None
    try:
        stored = json.loads(user_metadata)
    except ValueError:
        return None
    return stored.get(mark) if isinstance(stored, dict) else None
