"""The user of this process, for records of decisions that people have made."""

from __future__ import annotations

import getpass


def user_name() -> str:
    """Return the name of the user that this process runs as; `unknown` where the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
