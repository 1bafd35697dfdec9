"""Records of headrace's own: one that a newer release has written is refused by name, not read in part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace import __version__
from headrace.errors import UserError


def known_keys(said: Mapping[str, Any], known: Collection[str], what: str) -> Mapping[str, Any]:
    """A record as it was read, whose keys are all known.

    A release adds a key where the others no longer say all: whoever passed over it would take the record for another.

    Args:
        said: the record.
        known: the keys that this release reads.
        what: the record, for people.

    Raises:
        UserError: it has others.
    """
    for name in said:
        if name not in known:
            raise newer_release(what, name)
    return said


def newer_release(what: str, key: str) -> UserError:
    """The error to raise for a record with a key that this release does not know."""
    return UserError(
        f"{what} was written by a newer headrace: it has the key '{key}', which {__version__} does not know. Run that "
        f"release, or one after it, with this workspace"
    )
