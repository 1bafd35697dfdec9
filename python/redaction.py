"""Secrets stay out of what is written: by the names of what holds them, and by where they stand in a text."""

from __future__ import annotations

import json
import os
import re
from urllib.parse import quote, quote_plus

#: A key that is to hold a secret, wherever in it that is said: the name of an account or of a container may follow.
_SECRET = re.compile(
    r"secret|passw(or)?d|passphrase|token|credential|(?<![a-z])sas(?![a-z])|(?<=[._-])pwd(?![a-z])|(?<=[._])pass$"
    r"|(access|account|private|encryption|api|shared|storage|master)[._-]?key(?![a-z])|connection[._-]?string"
    # Of URLs that are signed: Azure's, Amazon's, Google's.
    r"|^sig$|^X-(Amz|Goog)-Signature$",
    re.IGNORECASE,
)
#: What such a key holds instead of the secret: its file, where it is asked for, a class that finds it, the service that
#: keeps it.
_NO_SECRET = re.compile(
    r"(file|path|token_request_url|providers?|provider\.type(\.[\w.-]+)?|[._-]enabled|secrets?manager|GOOGLE_APPLICATION_CREDENTIALS"
    # Of Spark and Hadoop: when Kerberos' tickets are renewed, and whether passwords may stand in the configuration.
    r"|renewal\.credentials|credentials\.(renewalRatio|retryWait)|clear-text-fallback)$",
    re.IGNORECASE,
)
#: Keys of references to a secret of Kubernetes.
_REFERENCE = re.compile(r"secretKeyRef|\.secrets\.", re.IGNORECASE)
#: `scheme://user:password@host`: what is between `//` and `@`, but for the user.
_USER_INFO = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@")
#: The key and what follows it, of `key=value` and `"key": "value"`; a whole word, so that a long one is read once.
_KEY = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*[=:]\s*""")
#: The same in the value of a property, where `group:artifact:version` is no key and its value.
_KEY_IN_VALUE = re.compile(r"""(?<![\w.-])([\w.-]+)(?:["']?\s*=|["']\s*:)\s*""")
#: The value; a quotation mark at its end is of a text that it stands in.
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&)}\]]*[^\s,;&)}\]"']""")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
#: Shorter values of variables say nothing, and stand in other words.
_SHORTEST = 6
#: Of values that are known to be secrets.
_SHORTEST_KNOWN = 4
HIDDEN = "***"
#: Values that are secrets whatever their variables and keys are called, and the names of variables with such values.
_values: set[str] = set()
_variables: set[str] = set()


def hide(value: str) -> None:
    """Have `redact` hide a value from now on: a secret that this process has read."""
    if len(value) >= _SHORTEST_KNOWN:
        # As it stands in addresses and in JSON, too.
        _values.update({value, quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1]})


def hide_variable(name: str) -> None:
    """Have `redact` hide the value of an environment variable that a pipeline says has a secret."""
    _variables.add(name)


def is_secret(key: str) -> bool:
    """Whether the value of a property or variable must not be seen, by its key."""
    return _SECRET.search(key) is not None and _NO_SECRET.search(key) is None and _REFERENCE.search(key) is None


def holds_secret(key: str, value: object) -> bool:
    """Whether a property must not be written down: by its key, or by what stands in its value.

    Unlike `redact` it does not ask the environment: what a file may hold is the same on every machine.
    """
    if is_secret(key):
        return True
    return isinstance(value, str) and _REFERENCE.search(key) is None and _without_secrets(value, _KEY_IN_VALUE) != value


def redact(text: str) -> str:
    """A text for a log, without what may be a secret.

    Hidden are passwords in URLs, values of keys that are named like secrets (`is_secret`), HTTP's credentials, private
    keys, the values of this process's own environment variables that are named so, and all that `hide` and
    `hide_variable` know of.
    """
    for name in _variables:
        hide(os.environ.get(name, ""))
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and is_secret(name):
            text = text.replace(value, HIDDEN)
    return _without_secrets(text, _KEY)


def _without_secrets(text: str, keys: re.Pattern[str]) -> str:
    """A text without what is a secret by where it stands: behind one of `keys`, and elsewhere."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    return _without_values(_BEARER.sub(rf"\1 {HIDDEN}", _USER_INFO.sub(rf"\1:{HIDDEN}@", text)), keys)


def _without_values(text: str, keys: re.Pattern[str]) -> str:
    """A text without values of secret keys; the value of another key may itself be a key: `Error: token=abc`."""
    parts, at, kept = list[str](), 0, 0
    while (key := keys.search(text, at)) is not None:
        at = key.end()
        if is_secret(key[1]) and (value := _VALUE.match(text, at)) is not None:
            parts += [text[kept:at], HIDDEN]
            at = kept = value.end()
    return "".join([*parts, text[kept:]])
