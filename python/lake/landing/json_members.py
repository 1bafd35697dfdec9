"""Members of JSON objects by Python, with the texts that Spark's parser (Jackson) gives them.

Jackson also takes texts in single quotes, and NaN and infinities as numbers. It spells a number with a fraction or an
exponent anew, as the double that it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from headrace.lake.faults import AMBIGUOUS
from headrace.lake.landing.exact_casts import Undecided, double_text

#: Jackson limits the digits of a number, the depth of an object and the length of a name. What comes near is undecided.
_MOST_DIGITS, _MOST_DEPTH, _MOST_NAME = 900, 400, 50_000
_STRINGS = re.compile(r"""("(?:[^"\\]|\\.)*")|('(?:[^'\\]|\\.)*')""", re.DOTALL)
_ESCAPES = re.compile(r'\\(.)|(")', re.DOTALL)
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class Integer(str):
    """A whole number, as text."""


class NamedNumber(str):
    """NaN or an infinity by name."""


class Members(tuple[tuple[str, Any], ...]):
    """Members of an object in their order; names may occur twice."""


def _integer(text: str) -> Integer:
    if len(text) > _MOST_DIGITS:
        raise Undecided(text)
    return Integer("0" if text == "-0" else text)


def _number(text: str) -> float | NamedNumber:
    if len(text) > _MOST_DIGITS:
        raise Undecided(text)
    value = float(text)
    return value if math.isfinite(value) else NamedNumber("Infinity" if value > 0 else "-Infinity")


def _checked(pairs: list[tuple[str, Any]]) -> Members:
    if any(len(name) > _MOST_NAME for name, _ in pairs):
        raise Undecided("a long name")
    return Members(pairs)


_PARSERS: dict[str, Any] = {
    "parse_int": _integer,
    "parse_float": _number,
    "parse_constant": NamedNumber,
    "strict": True,
}
_DECODER = json.JSONDecoder(object_pairs_hook=Members, **_PARSERS)
_CHECKING_DECODER = json.JSONDecoder(object_pairs_hook=_checked, **_PARSERS)


def members_of(text: str) -> Members | None:
    """Return the members of a JSON object; None where the text is none.

    Values are str, Integer, float, NamedNumber, bool, None, Members, and lists of them.

    Raises:
        Undecided: Spark's rules must decide.
    """
    if not text.rstrip(" ").endswith("}"):
        return None
    if text.count("{") + text.count("[") > _MOST_DEPTH:
        raise Undecided(text)
    decoder = _DECODER if len(text) <= _MOST_NAME else _CHECKING_DECODER
    try:
        value = decoder.decode(text)
    except ValueError:
        if "INF" in text or "+I" in text:
            raise Undecided(text) from None
        if "'" not in text:
            return None
        try:
            value = decoder.decode(_STRINGS.sub(_in_double_quotes, text))
        except ValueError:
            return None
    return value if isinstance(value, Members) else None


def _in_double_quotes(match: re.Match[str]) -> str:
    """Return a string literal in double quotes, which alone may not be escaped as `\\'`."""
    inside = match.group()[1:-1]

    def escaped(sign: re.Match[str]) -> str:
        if sign[1] is None:
            return '\\"'
        return "'" if sign[1] == "'" else sign[0]

    return f'"{_ESCAPES.sub(escaped, inside)}"'


def text_of(value: Any) -> str:
    """Return a value that is not null as text. Raises Undecided."""
    if isinstance(value, str) and not isinstance(value, NamedNumber):
        return str(value)
    return _json(value)


def elements_of(value: Any) -> list[Any] | None:
    """Return the elements of a list that is not null, each as `element_text` takes it; None where it is no list.

    Raises:
        Undecided: it is a text, which may be that of a list.
    """
    if isinstance(value, list):
        return value
    if isinstance(value, str) and value.lstrip(" \t\r\n").startswith("["):
        raise Undecided(value)
    return None


def element_text(value: Any) -> str | None:
    """Return an element of a list as text; None for null. Raises Undecided."""
    if isinstance(value, NamedNumber):
        return str(value)
    return None if value is None else text_of(value)


def _json(value: Any) -> str:
    """Return the JSON that Jackson writes."""
    if isinstance(value, Members):
        return "{" + ",".join(f"{_quoted(name)}:{_json(inner)}" for name, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return double_text(value)
    return str(value) if isinstance(value, Integer) else _quoted(value)


def _quoted(text: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04X}"

    return f'"{_TO_ESCAPE.sub(escaped, text)}"'


class DeclaredNames:
    """Names of declared columns, as the members of an object are matched with them.

    The rules are those of headrace.schema.match_names.
    """

    def __init__(self, declared: Sequence[str]) -> None:
        self.declared = declared
        self.present = frozenset(declared)
        self._by_lower = {name.lower(): name for name in reversed(declared)}

    def renamed(self, members: Members) -> tuple[Members, str | None]:
        """Return members with declared ones under their declared names, and why some cannot be distinguished.

        Members that cannot be distinguished keep their names.
        """
        keys = {name for name, _ in members}
        if not any(name.lower() in self._by_lower for name in keys - self.present):
            return members, None
        names = [self._declared_name(name, keys) for name, _ in members]
        if len(set(names)) == len(names):
            return Members((name, value) for name, (_, value) in zip(names, members, strict=True)), None
        twice = next((name for name in self.declared if names.count(name) > 1), "a field")
        return members, f"{twice}{AMBIGUOUS}"

    def _declared_name(self, key: str, keys: set[str]) -> str:
        name = self._by_lower.get(key.lower())
        return key if key in self.present or name is None or name in keys else name
