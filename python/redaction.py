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
#: The key and what follows it, of `key=value` and `"key": "value"`; a whole word, so that a long one is read once.
_KEY = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*[=:]\s*""")
#: The value; a quotation mark at its end is of a text that it stands in.
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&)}\]]*[^\s,;&)}\]"']""")
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
    return _without_values(text)


def _without_values(text: str) -> str:
    """A text without values of secret keys; the value of another key may itself be a key: `Error: token=abc`."""
    parts, at, kept = list[str](), 0, 0
    while (key := _KEY.search(text, at)) is not None:
        at = key.end()
        if is_secret(key[1]) and (value := _VALUE.match(text, at)) is not None:
            parts += [text[kept:at], HIDDEN]
            at = kept = value.end()
    return "".join([*parts, text[kept:]])
