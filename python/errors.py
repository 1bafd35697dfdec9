"""The one exception for things that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Wrong input, configuration or environment: shown as one message, never as a stack trace; exit code 2.

    The message says what is wrong, where (file, column, key, row count), and what to do about it.
    """


EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
