"""Single texts and JSON objects by Python: the values of the declared types, as docs/landing-files.md has them.

headrace.lake.landing.convert reads whole columns and leaves what it is not sure of. The rest is decided here, text by
text. Texts of tables are read by the same rules in Spark (headrace.lake.values), so blanks, control characters and
digits are those that Java knows.

JSON may also have texts in single quotes, and NaN and infinities as numbers. A number with a fraction or an exponent
that becomes text is spelled anew: with the fewest digits that make the same double, as Java 19 and later spell it.

A declared path that goes through a list leads to a value whose numbers stay as they are spelled. Its steps are those of
headrace.config.schema.path_steps. Names match as headrace.config.schema.match_names says. A name or a key behind a list
of records is the first record whose field `key` has it.

JSON may spell half a surrogate pair alone (`"\\ud83d"`): half an emoji that somebody has cut in two. It is no
character, and no text in UTF-8 can have it. U+FFFD, the replacement character, takes its place. Two different ids may
so become one: the columns that had some are recorded, for a row to be refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import KEY_FIELD, Each, Element, EpochUnit, decimal_digits, is_of_list, match_names
from headrace.lake.faults import AMBIGUOUS
from headrace.lake.landing.convert import arrow_type, from_text, zone_offset

#: What Spark trims of a text before it reads a number, a time or a boolean: blanks and control characters.
_TRIMMED = "".join(map(chr, range(0x21))) + "\x7f"
#: What `String.trim` of Java removes.
_JAVA_TRIMMED = "".join(map(chr, range(0x21)))
#: Java's `$` also stands before a line end at the end of the text.
_END = "(?:\r\n|[\n\r\u0085\u2028\u2029])?"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+([.][0-9]{0,18})?([eE][+]?[0-9]{1,2})?" + _END)
_EPOCH = re.compile(r"[+-]?[0-9]+([.][0-9]+)?([eE][+]?[0-9]{1,2})?" + _END)
_LETTERS = re.compile("[A-DF-Za-df-z]")
_FLOAT = re.compile(r"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})" + _END)
_TIMESTAMP = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,9}))?)?"
    r"(?: ?(?:(Z|UTC|GMT)|([+-])([0-9]{2})(?::?([0-9]{2}))?))?)?" + _END
)
_TRUE, _FALSE = frozenset({"true", "t", "yes", "y", "1"}), frozenset({"false", "f", "no", "n", "0"})
_BITS = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}
#: Blanks of Java's class Character, which may stand between the digits of Base64.
_JAVA_BLANKS = re.compile("[\t-\r\x1c-\x20\u1680\u2000-\u2006\u2008-\u200a\u2028\u2029\u205f\u3000]")
_BASE64 = re.compile("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?")
#: Below it every whole number is a double.
_EXACT = 1 << 53
#: Digits of decimal(38,18) before its point.
_WHOLE_DIGITS = 20
#: Microseconds since 1970 at the beginning of year 1 and the end of year 9999.
_FIRST_MICROS, _LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
#: Digits before and behind the point of the decimal that a number since 1970 is read as.
_EPOCH_DIGITS = {
    "epoch_seconds": (18, 6),
    "epoch_milliseconds": (21, 3),
    "epoch_microseconds": (21, 3),
    "epoch_nanoseconds": (28, 3),
}
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_DAY_MICROS = 86_400_000_000
_MOST_OFFSET = 18 * 60
#: A pair; half of one; another escape, which may be a backslash before a `u`.
_HALF_ESCAPE = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_HALF = re.compile("[\ud800-\udfff]")


def cast_texts(text: pa.StringArray, declared: str, timezone: str, unit: EpochUnit | None) -> pa.Array:
    """Convert texts to a declared scalar type; null for texts that are none.

    Args:
        text: may have nulls.
        declared: the type.
        timezone: of times without an offset.
        unit: of a column of `source.timestamps`.
    """
    values = from_text(text, declared, timezone, unit)
    if values.null_count == text.null_count:
        return values
    rest = pc.and_(values.is_null(), text.is_valid())
    distinct = text.filter(rest).dictionary_encode()
    cast = _cast_of(declared, timezone, unit)
    exact = _array([cast(unread) for unread in distinct.dictionary.to_pylist()], declared)
    return pc.replace_with_mask(values, rest, exact.take(distinct.indices))


def _array(values: list[Any], declared: str) -> pa.Array:
    if declared in ("timestamp", "timestamp_ntz"):
        return pa.array(values, pa.int64()).cast(arrow_type(declared))
    if declared == "date":
        return pa.array(values, pa.int32()).cast(pa.date32())
    return pa.array(values, arrow_type(declared))


def _cast_of(declared: str, timezone: str, unit: EpochUnit | None) -> Callable[[str], Any]:
    """Return the cast of one text: of dates to days, of timestamps to microseconds since 1970."""
    if unit is not None:
        return lambda text: _since_1970(text, unit)
    if declared == "timestamp":
        return lambda text: _micros(text, timezone)
    if declared in _BITS:
        return lambda text: _integer(text, _BITS[declared])
    if digits := decimal_digits(declared):
        return _exact_decimal(*digits)
    casts: dict[str, Callable[[str], Any]] = {
        "date": _days_of,
        "timestamp_ntz": _local_micros,
        "boolean": _boolean,
        "float": _float,
        "double": _double,
        "binary": _hashed,
    }
    return casts[declared]


def _exact_decimal(precision: int, scale: int) -> Callable[[str], Decimal | None]:
    """Return the cast to a decimal. Nothing but zeros may stand behind the digits that it has room for."""
    exact = re.compile(rf"[+-]?[0-9]*([.][0-9]{{0,{scale}}}0*)?" + _END)

    def cast(text: str) -> Decimal | None:
        number = text.strip(_JAVA_TRIMMED)
        if not exact.fullmatch(text) or not number.isascii() or not any(map(str.isdigit, number)):
            return None
        return _decimal(number, precision - scale, scale)

    return cast


def _hashed(text: str) -> str | None:
    """Return the SHA-256 of what a text of Base64 (RFC 4648) stands for, in hexadecimal."""
    digits, padding, rest = text.partition("=")
    plain = _JAVA_BLANKS.sub("", digits) + padding + rest
    if not _BASE64.fullmatch(plain):
        return None
    plain = plain.rstrip("=")
    return hashlib.sha256(base64.b64decode(plain + "=" * (-len(plain) % 4))).hexdigest()


def _boolean(text: str) -> bool | None:
    word = text.strip(_TRIMMED).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _integer(text: str, bits: int) -> int | None:
    def inside(number: int) -> int | None:
        return number if -(1 << bits) <= number < 1 << bits else None

    digits = text.strip(_TRIMMED)
    if _INTEGER.fullmatch(digits):
        # More digits are out of range, whatever they are.
        number = inside(int(digits)) if len(digits.lstrip("+-0")) <= _WHOLE_DIGITS else None
        if number is not None:
            return number
    if not _WHOLE_NUMBER.fullmatch(text):
        return None
    exact = _decimal(text, _WHOLE_DIGITS, 18)
    # Scientific notation may be that of a double, to which JSON's numbers were rounded.
    if exact is None or exact != exact.to_integral_value(ROUND_FLOOR):
        return None
    return None if "e" in text.lower() and abs(exact) >= _EXACT else inside(int(exact))


def _decimal(text: str, whole_digits: int, scale: int) -> Decimal | None:
    """Return a number rounded to `scale` digits behind its point; None where it has too many before it."""
    stripped = text.strip(_JAVA_TRIMMED)
    if not stripped.isascii():  # a line end that Python's Decimal would trim, and Java does not
        return None
    number = Decimal(stripped)
    if number and number.adjusted() >= whole_digits:
        return None
    with localcontext() as context:
        context.prec = whole_digits + scale + len(stripped) + 2
        rounded = number.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)
    return rounded if not rounded or rounded.adjusted() < whole_digits else None


def _double(text: str) -> float | None:
    number = text.strip(_JAVA_TRIMMED)
    if _LETTERS.search(text) or not _FLOAT.fullmatch(number):
        return None
    value = float(number)
    return value if math.isfinite(value) else None


def _float(text: str) -> float | None:
    value = _double(text)
    if value is None:
        # Beyond a double it is beyond a float.
        return None
    with np.errstate(over="ignore", under="ignore"):
        nearest = np.float32(value)
        if value and np.isfinite(nearest) and abs(value) > 1e-60:
            # By way of a double it may be rounded twice.
            exact = Fraction(text.strip(_JAVA_TRIMMED))
            sides = [np.nextafter(nearest, np.float32(side)) for side in (-np.inf, np.inf)]
            candidates = [c for c in (nearest, *sides) if np.isfinite(c)]
            nearest = min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1))
    return float(nearest) if np.isfinite(nearest) else None


def _days(year: int, month: int, day: int) -> int | None:
    """Return days since 1970 of a date of the proleptic Gregorian calendar, which has a year 0."""
    cycles, rest = divmod(year, 400)
    try:
        ordinal = date(2000 + rest, month, day).toordinal()
    except ValueError:
        return None
    return ordinal - _EPOCH_ORDINAL + (cycles - 5) * 146_097


def _days_of(text: str) -> int | None:
    match = _DATE.fullmatch(text)
    if match is None or len(text.strip(_TRIMMED)) > len("yyyy-MM-dd"):
        return None
    return _days(*map(int, match.groups()))


def _micros(text: str, timezone: str) -> int | None:
    match = _TIMESTAMP.fullmatch(text)
    if match is None or text.strip(_TRIMMED)[-1] in "\u0085\u2028\u2029":
        return None
    year, month, day, hour, minute, second, fraction, is_utc, sign, offset_hours, offset_minutes = match.groups()
    days = _days(int(year), int(month), int(day))
    if days is None or int(hour or 0) > 23 or int(minute or 0) > 59 or int(second or 0) > 59:
        return None
    seconds = (int(hour or 0) * 60 + int(minute or 0)) * 60 + int(second or 0)
    micros = days * _DAY_MICROS + seconds * 1_000_000 + int((fraction or "0")[:6].ljust(6, "0"))
    if sign is not None:
        offset = int(offset_hours) * 60 + int(offset_minutes or 0)
        if offset > _MOST_OFFSET or int(offset_minutes or 0) > 59:
            return None
        return micros - (-offset if sign == "-" else offset) * 60_000_000
    if is_utc or timezone == "UTC":
        return micros
    return micros - zone_offset(micros, timezone)


def _local_micros(text: str) -> int | None:
    """Return a time without an offset as it is written, in microseconds since 1970."""
    match = _TIMESTAMP.fullmatch(text)
    return None if match is None or match[8] or match[9] else _micros(text, "UTC")


def _since_1970(text: str, unit: EpochUnit) -> int | None:
    if not _EPOCH.fullmatch(text):
        return None
    number = _decimal(text, *_EPOCH_DIGITS[unit])
    if number is None:
        return None
    with localcontext() as context:
        context.prec = 60
        factor = {"epoch_seconds": Decimal(1_000_000), "epoch_milliseconds": Decimal(1_000)}.get(unit, Decimal(1))
        if unit == "epoch_nanoseconds":
            factor = Decimal("0.001")
        micros = int((number * factor).to_integral_value(ROUND_FLOOR))
    return micros if _FIRST_MICROS <= micros <= _LAST_MICROS else None


def double_text(value: float) -> str:
    """Return a finite double with the fewest digits that make it, at least two, in Java's spelling (`1.0E-5`)."""
    return _java_text(value, repr(value))


def float_text(value: float) -> str:
    """Return a finite float (32 bits) with the fewest digits that make it, at least two, in Java's spelling."""
    return _java_text(value, str(np.format_float_scientific(np.float32(value))))


def _java_text(value: float, fewest_digits: str) -> str:
    sign = "-" if math.copysign(1, value) < 0 else ""
    if value == 0:
        return f"{sign}0.0"
    _, figures, exponent = Decimal(fewest_digits).normalize().as_tuple()
    if len(figures) == 1:  # of two digits there may be nearer ones: 4.9E-324
        _, figures, exponent = Decimal(f"{value:.1e}").as_tuple()
    digits = "".join(map(str, figures))
    assert isinstance(exponent, int)
    point = len(digits) + exponent
    digits = digits.rstrip("0")
    if -3 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if 0 < point <= 7:
        digits = digits.ljust(point, "0")
        return f"{sign}{digits[:point]}.{digits[point:] or '0'}"
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{point - 1}"


def moment_text(micros: int) -> str:
    """Return microseconds since 1970 as Spark spells a timestamp in UTC."""
    days, rest = divmod(micros, _DAY_MICROS)
    cycles, day = divmod(days + _EPOCH_ORDINAL - date(2000, 1, 1).toordinal(), 146_097)
    moment = datetime(2000, 1, 1, tzinfo=UTC) + timedelta(days=day, microseconds=rest)
    year = moment.year + 400 * cycles
    spelled = f"+{year}" if year > 9999 else f"{year:04d}" if year >= 0 else f"-{-year:04d}"
    fraction = f".{moment.microsecond:06d}".rstrip("0").rstrip(".")
    return f"{spelled}-{moment:%m-%d %H:%M:%S}{fraction}"


#: Of one line of JSON at most: levels of objects and lists within each other, digits of a number.
_MOST_LEVELS, _MOST_DIGITS = 999, 1_000
#: Lines of fewer brackets are read within Python's usual depth of calls; for others it may grow to the second.
_USUAL_LEVELS, _MOST_CALLS = 150, 3_000
_DEEP = Lock()
#: String literals in double and in single quotes, and infinities as JSON does not spell them.
_LENIENT = re.compile(r"""("(?:[^"\\]|\\.)*")|('(?:[^'\\]|\\.)*')|([+-]?INF(?![0-9A-Za-z])|\+Infinity)""", re.DOTALL)
_STRINGS = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_ESCAPES = re.compile(r'\\(.)|(")', re.DOTALL)
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class Integer(str):
    """A whole number, as text."""


class NamedNumber(str):
    """NaN or an infinity by name."""


class Members(tuple[tuple[str, Any], ...]):
    """Members of an object in their order; names may occur twice."""


def _whole_number(text: str) -> Integer:
    _check_digits(text)
    return Integer("0" if text == "-0" else text)


def _number(text: str) -> float | NamedNumber:
    _check_digits(text)
    value = float(text)
    return value if math.isfinite(value) else NamedNumber("Infinity" if value > 0 else "-Infinity")


def _check_digits(text: str) -> None:
    if len(text) > _MOST_DIGITS and sum(map(str.isdigit, text)) > _MOST_DIGITS:
        raise ValueError(f"a number of more than {_MOST_DIGITS:,} digits")


_DECODER = json.JSONDecoder(
    object_pairs_hook=Members, parse_int=_whole_number, parse_float=_number, parse_constant=NamedNumber, strict=True
)


@contextmanager
def room_for_levels(texts: Sequence[str | bytes]) -> Iterator[None]:
    """Let calls go as deep as the objects in some texts of JSON take, within the block."""
    if not any(_may_be_deep(text) for text in texts):
        yield
        return
    with _DEEP:
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(max(usual, _MOST_CALLS))
        try:
            yield
        finally:
            sys.setrecursionlimit(usual)


def _may_be_deep(text: str | bytes) -> bool:
    if isinstance(text, bytes):
        return len(text) > _USUAL_LEVELS and text.count(b"{") + text.count(b"[") > _USUAL_LEVELS
    return len(text) > _USUAL_LEVELS and text.count("{") + text.count("[") > _USUAL_LEVELS


def _levels(text: str) -> int:
    """Return how many objects and lists of a text of JSON are within each other."""
    most = level = 0
    for sign in re.findall(r"[][{}]", _STRINGS.sub("", text)):
        level += 1 if sign in "{[" else -1
        most = max(most, level)
    return most


def members_of(text: str) -> Members | None:
    """Return the members of a JSON object; None where the text is none, or beyond the limits of one.

    Values are str, Integer, float, NamedNumber, bool, None, Members, and lists of them. U+FFFD stands for half a
    surrogate pair.
    """
    if not text.rstrip(" ").endswith("}"):
        return None
    value = _parsed(text)
    return value if isinstance(value, Members) else None


def _parsed(text: str) -> Any:
    """Return what a text of JSON says; None where it is none."""
    if _may_be_deep(text) and _levels(text) > _MOST_LEVELS:
        return None
    if "\\u" in text:
        text = without_halves(text.encode()).decode()
    try:
        return _DECODER.decode(text)
    except ValueError:
        if not any(sign in text for sign in ("'", "INF", "+Infinity")):
            return None
    try:
        return _DECODER.decode(_LENIENT.sub(_as_json, text))
    except ValueError:
        return None


def _as_json(match: re.Match[str]) -> str:
    """Return a string literal in double quotes, which alone may not be escaped as `\\'`; an infinity by JSON's name."""
    if match[3] is not None:
        return "-Infinity" if match[3].startswith("-") else "Infinity"

    def escaped(sign: re.Match[str]) -> str:
        if sign[1] is None:
            return '\\"'
        return "'" if sign[1] == "'" else sign[0]

    return f'"{_ESCAPES.sub(escaped, match.group()[1:-1])}"'


def text_of(value: Any) -> str:
    """Return a value that is not null as text."""
    if isinstance(value, str) and not isinstance(value, NamedNumber):
        return str(value)
    return _json(value)


def elements_of(value: Any) -> list[Any] | None:
    """Return the elements of a list, or of a text that is one in JSON, each as `element_text` takes it; else None."""
    if isinstance(value, str) and value.lstrip(" \t\r\n").startswith("["):
        value = _parsed(value)
    return value if isinstance(value, list) else None


def element_text(value: Any) -> str | None:
    """Return an element of a list as text; None for null."""
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

    The rules are those of headrace.config.schema.match_names.
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


class NumberText(str):
    """A number as the text spells it."""


@dataclass(frozen=True)
class Reached:
    """Target of a path in one object."""

    #: None where there is none, or null.
    value: Any
    #: Whether the object has the path's last field.
    is_present: bool = True
    #: Whether the path went through a list.
    by_list: bool = False
    #: What stands on the way and is neither what the path expects nor null; its value cannot be read.
    obstacle: Any = None


def parsed(line: bytes | str) -> Any:
    """Return what a text of JSON says, numbers as `NumberText`.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(line, parse_int=NumberText, parse_float=NumberText)


def reach(value: Any, steps: Sequence[str]) -> Reached:
    """Follow a path."""
    if not steps:
        return Reached(value)
    if value is None:
        return Reached(None, is_present=False)
    step, rest = steps[0], steps[1:]
    if isinstance(value, str) and not isinstance(value, NumberText) and not is_of_list(step):
        try:
            inside = parsed(value)
        except ValueError:
            inside = None
        if not isinstance(inside, Mapping):
            return Reached(None, obstacle=value)
        value = inside
    if isinstance(value, list):
        in_list = _reach_in_list(value, step, rest)
        return Reached(in_list.value, in_list.is_present, True, in_list.obstacle)
    if not isinstance(value, Mapping) or is_of_list(step):
        return Reached(None, by_list=is_of_list(step), obstacle=value)
    try:
        name = match_names([step], value).get(step)
    except ValueError:
        return Reached(None, obstacle=value)
    return Reached(None, is_present=False) if name is None else reach(value[name], rest)


def _reach_in_list(values: list[Any], step: str, rest: Sequence[str]) -> Reached:
    if isinstance(step, Each):
        reached = [reach(value, rest) for value in values]
        obstacle = next((values for target in reached if target.obstacle is not None), None)
        if any(isinstance(later, Each) for later in rest):
            return Reached(
                [e for target in reached if target.value is not None for e in target.value], obstacle=obstacle
            )
        return Reached([target.value for target in reached], obstacle=obstacle)
    if isinstance(step, Element):
        place = int(step)
        return reach(values[place], rest) if place < len(values) else Reached(None, is_present=False)
    records = [value for value in values if isinstance(value, Mapping) and KEY_FIELD in value]
    for record in records:
        if record[KEY_FIELD] == step:
            return reach(record, rest)
    return Reached(None, is_present=False, obstacle=values if values and not records else None)


def spelled_text(value: Any) -> str | None:
    """Return a value as text: a text itself, a number as it is spelled, lists and objects as JSON; None for null."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return _spelled_json(value)


def _spelled_json(value: Any) -> str:
    if isinstance(value, NumberText):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{_spelled_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spelled_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def reached_by_lists(line: bytes, paths: Mapping[int, Sequence[str]]) -> dict[int, Reached]:
    """Return what paths that go through a list there lead to in a line of JSON, by their numbers."""
    if b"[" not in line:
        return {}
    try:
        row = parsed(line)
        targets = {k: reach(row, path) for k, path in paths.items()}
    except (ValueError, RecursionError):  # no row in any case: no JSON, or too deep for any reader
        return {}
    return {k: target for k, target in targets.items() if target.by_list}


def without_halves(line: bytes) -> bytes:
    """Return a line of JSON with U+FFFD, as JSON spells it, for each half of a surrogate pair."""
    return _HALF_ESCAPE.sub(lambda m: m.group() if m.group(1) is None else rb"\ufffd", line)


def columns_with_halves(line: bytes, paths: Sequence[Sequence[str]]) -> list[int]:
    """Return which of some columns, by their paths in an object, have a text with half a surrogate pair."""
    try:
        row = parsed(line)
        return [i for i, path in enumerate(paths) if _has_half(reach(row, path).value)]
    except (ValueError, RecursionError):  # no row in any case: no JSON, or too deep for any reader
        return []


def _has_half(value: Any) -> bool:
    if isinstance(value, str):
        return _HALF.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_half(key) or _has_half(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_has_half, value))
