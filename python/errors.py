"""The one exception for things that a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_REFUSED = 3
#: `EX_UNAVAILABLE` of sysexits.h.
EXIT_BUSY = 69
#: `EX_TEMPFAIL` of sysexits.h.
EXIT_INCOMPLETE = 75


class UserError(Exception):
    """Wrong input, configuration or environment: shown as one message, never as a stack trace; exit code 2.

    The message says what is wrong, where (file, column, key, row count), and what to do about it.
    """

    exit_code = EXIT_USER_ERROR


class BusyError(UserError):
    """Another process is at work on the same thing: nothing to mend, try later; exit code 69."""

    exit_code = EXIT_BUSY


class RefusedError(UserError):
    """What was made failed its audit and was not published: trying again changes nothing; exit code 3."""

    exit_code = EXIT_REFUSED


class IncompleteError(UserError):
    """Not all is there or done yet, and will be: nothing to mend, run it again later; exit code 75."""

    exit_code = EXIT_INCOMPLETE


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for a message about an unknown name; empty where nothing known is like it."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""
