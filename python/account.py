"""Whose process this is: for records of what people have decided."""

from __future__ import annotations

import getpass


def user_name() -> str:
    """The user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
