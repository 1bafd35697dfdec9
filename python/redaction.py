"""Secrets stay out of what is written: by the names of what holds them, and by where they stand in a text."""

from __future__ import annotations

import os
import re

#: A key that is to hold a secret, wherever in it that is said: the name of an account or of a container may follow.
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|token|\bsas\b"
    r"|(access|account|private|encryption|api|shared)[._-]?key(?![a-z])",
    re.IGNORECASE,
)
#: What such a key holds instead of the secret: its file, a class that finds it, a reference to it.
_NO_SECRET = re.compile(r"(file|path|provider|provider\.type|\.enabled)$|secretKeyRef|\.secrets\.", re.IGNORECASE)
#: `scheme://user:password@host`: what is between `//` and `@`, but for the user.
_USER_INFO = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@")
#: `key=value` and `"key": "value"`.
_ASSIGNMENT = re.compile(r"""([\w.-]+)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&)}\]]+)""")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
#: Shorter values of variables say nothing, and stand in other words.
_SHORTEST = 6
HIDDEN = "***"


def is_secret(key: str) -> bool:
    """Whether the value of a property or variable must not be seen, by its key."""
    return _SECRET.search(key) is not None and _NO_SECRET.search(key) is None


def redact(text: str) -> str:
    """A text for a log, without what may be a secret.

    Hidden are passwords in URLs, values of keys that are named like secrets (`is_secret`), HTTP's credentials, and the
    values of this process's own environment variables that are named so.
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and is_secret(name):
            text = text.replace(value, HIDDEN)
    text = _BEARER.sub(rf"\1 {HIDDEN}", _USER_INFO.sub(rf"\1:{HIDDEN}@", text))
    return _ASSIGNMENT.sub(_without_value, text)


def _without_value(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if is_secret(found[1]) else found[0]
