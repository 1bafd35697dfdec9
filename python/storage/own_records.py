"""Version check of headrace's own records: one with unknown keys, of a newer release, is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace import __version__
from headrace.errors import UserError


def known_keys(record: Mapping[str, Any], known: Collection[str], label: str) -> Mapping[str, Any]:
    """Return a record after checking that this release knows all of its keys.

    A release adds a key where the existing ones no longer suffice: a reader that ignored it would misread the record.

    Args:
        record: the record as it was read.
        known: the keys that this release reads.
        label: the record's name in messages.

    Raises:
        UserError: the record has another key.
    """
    for name in record:
        if name not in known:
            raise newer_release(label, name)
    return record


def newer_release(label: str, key: str) -> UserError:
    """Return the error to raise for a record with a key that this release does not know."""
    return UserError(
        f"{label} was written by a newer headrace: it has the key '{key}', which {__version__} does not know. Run that "
        f"release, or one after it, with this workspace"
    )
