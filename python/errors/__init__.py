"""Errors that a user can mend, and the exit codes of commands; what an exception of others means to a user.

| code | | class |
|---|---|---|
| 0 | done, or nothing to do | |
| 1 | a fault of the program, shown with its trace; a store or disk that fails for another reason | |
| 2 | input, configuration or environment that the user can mend | `UserError` |
| 3 | refused: an audit, a limit of drift, a gate | `RefusedError` |
| 69 | another process is at work: try later | `BusyError` |
| 75 | not all is there yet; a store, a server or a mount is away; a disk is full: run it later | `IncompleteError` |
| 130, 143 | stopped by Ctrl-C, by SIGTERM | |

`translate` tells what an exception means (`exit_message`), by its own patterns and those of `stores` and `databases`,
and which extra of the wheel brings a module that is not installed. This module imports nothing but the
standard library: Airflow's environment reads it by its path.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_REFUSED = 3
#: As EX_UNAVAILABLE in sysexits.h.
EXIT_BUSY = 69
#: As EX_TEMPFAIL in sysexits.h.
EXIT_INCOMPLETE = 75


class UserError(Exception):
    """Wrong input, configuration or environment: reported as one message without a stack trace; exit code 2.

    The message says what is wrong, where (file, column, key, row count), and what to do about it.
    """

    exit_code = EXIT_USER_ERROR


class BusyError(UserError):
    """A resource that another process holds: there is nothing to mend, try later; exit code 69."""

    exit_code = EXIT_BUSY


class RefusedError(UserError):
    """A result that failed its audit and was not published: a retry changes nothing; exit code 3."""

    exit_code = EXIT_REFUSED


class IncompleteError(UserError):
    """Input that has not all arrived, or work that is not done yet: run it again later; exit code 75."""

    exit_code = EXIT_INCOMPLETE


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for a message about an unknown name; empty where no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


def known_keys(record: Mapping[str, Any], known: Collection[str], label: str) -> Mapping[str, Any]:
    """Return a record of headrace's own after checking that this release knows all of its keys.

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
    from headrace import __version__  # here: Airflow's environment reads this module without headrace

    return UserError(
        f"{label} was written by a newer headrace: it has the key '{key}', which {__version__} does not know. Run that "
        f"release, or one after it, with this workspace"
    )
