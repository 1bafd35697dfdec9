"""Secrets stay out of what is written: by the names of what holds them, and by where they stand in a text."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from typing import Any
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
#: The same in a sentence, where a colon may end the name of a key: `publish.warehouse.password: unknown key`.
_KEY_IN_SENTENCE = re.compile(r"""(?<![\w.-])([\w.-]+)(?:["']?[^\S\n]*=[^\S\n]*|["'][^\S\n]*:[^\S\n]*(?=["'\d]))""")
#: The same in the value of a property, where `group:artifact:version` is no key and its value.
_KEY_IN_VALUE = re.compile(r"""(?<![\w.-])([\w.-]+)(?:["']?\s*=|["']\s*:)\s*""")
#: The value; a quotation mark at its end is of a text that it stands in.
_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&)}\]]*[^\s,;&)}\]"']""")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
#: Shorter values of variables say nothing, and stand in other words.
_SHORTEST = 6
#: Of values that are known to be secrets. A shorter one would be hidden within other words, and so be told by the gaps.
_SHORTEST_KNOWN = 4
#: Of a line of a secret that has several. Logs indent lines and begin them with marks, so each is hidden by itself.
_SHORTEST_LINE = 8
HIDDEN = "***"
#: Values that are secrets whatever their variables and keys are called, and the names of variables with such values.
_values: set[str] = set()
_variables: set[str] = set()


def hide(value: str) -> None:
    """Have `redact` hide a value from now on: a secret that this process has read."""
    if len(value) >= _SHORTEST_KNOWN:
        _values.add(value)


def hide_variable(name: str) -> None:
    """Have `redact` hide the value of an environment variable that a pipeline says has a secret."""
    _variables.add(name)


def is_secret(key: str) -> bool:
    """Return whether the value of a property or variable is a secret, by its key."""
    return _SECRET.search(key) is not None and _NO_SECRET.search(key) is None and _REFERENCE.search(key) is None


def holds_secret(key: str, value: object) -> bool:
    """Return whether a property must not be written down: by its key, or by its value.

    Unlike `redact` it does not ask the environment: what a file may hold is the same on every machine.
    """
    if is_secret(key):
        return True
    return isinstance(value, str) and _REFERENCE.search(key) is None and _without_secrets(value, _KEY_IN_VALUE) != value


def redact(text: str) -> str:
    """Return a text for a log, without what may be a secret.

    Hidden are passwords in URLs, values of keys that are named like secrets (`is_secret`), HTTP's credentials, private
    keys, the values of this process's own environment variables that are named so, and all that `hide` and
    `hide_variable` know of. Values of fewer than 4 characters (6 of variables) are left: other words have them, too.
    """
    return _without_secrets(_without_known(text), _KEY)


def redact_sentence(text: str) -> str:
    """Redact a message that may name keys of a spec before a colon."""
    return _without_secrets(_without_known(text), _KEY_IN_SENTENCE)


def redact_leaves(value: Any) -> Any:
    """Return a value for JSON: `redact` is applied to the texts in its lists and mappings; other types become text."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {_redact_key(key): _redact_item(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_leaves(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))


def _redact_key(key: Any) -> Any:
    return _without_known(key) if isinstance(key, str) else key


def _redact_item(key: str, value: Any) -> Any:
    return HIDDEN if isinstance(value, str) and is_secret(key) else redact_leaves(value)


def _without_known(text: str) -> str:
    """Return a text without the values that are known to be secrets, in each of their forms."""
    values = _values | {value for name in _variables if len(value := os.environ.get(name, "")) >= _SHORTEST_KNOWN}
    values |= {v for name, v in os.environ.items() if len(v) >= _SHORTEST and _is_secret_variable(name)}
    forms = {form for value in values for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    return is_secret(name)


@lru_cache(maxsize=1024)
def _forms(value: str) -> frozenset[str]:
    """Return a secret as texts have it: as it is, in addresses, in JSON, as `repr` and `ascii` write it, by lines."""
    data = value.encode("utf-8", errors="surrogatepass")
    forms = {value, quote(data), quote(data, safe=""), quote_plus(data), repr(data)[2:-1]}
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    for written in (repr, ascii):
        # Both quotation marks are in it: the text that has the secret decides whether the single one is escaped.
        body = written(value + "'\"")[1:-4]
        forms |= {body, body.replace("\\'", "'")}
    if len(lines := value.splitlines()) > 1:
        forms |= {line.strip() for line in lines if len(line.strip()) >= _SHORTEST_LINE}
    return frozenset(form for form in forms if form.strip())


def _without_secrets(text: str, keys: re.Pattern[str]) -> str:
    """Return a text without secrets by position: behind one of `keys`, and elsewhere."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    return _without_values(_BEARER.sub(rf"\1 {HIDDEN}", _USER_INFO.sub(rf"\1:{HIDDEN}@", text)), keys)


def _without_values(text: str, keys: re.Pattern[str]) -> str:
    """Return a text without values of secret keys; the value of another key may itself be a key: `Error: token=abc`."""
    parts, at, kept = list[str](), 0, 0
    while (key := keys.search(text, at)) is not None:
        at = key.end()
        if is_secret(key[1]) and (value := _VALUE.match(text, at)) is not None:
            parts += [text[kept:at], HIDDEN]
            at = kept = value.end()
    return "".join([*parts, text[kept:]])
