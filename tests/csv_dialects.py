"""CSV in drawn dialects, and an independent reading of it: Python's `csv` and arithmetic of decimals."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

#: Formats of times, whether the text has an offset, and how it is written: Python's strftime, but for the fraction.
TIMES = [
    "%Y-%m-%d %H:%M:%S UTC",
    "%Y-%m-%d %H:%M:%S,%f",
    "%d.%m.%Y %H:%M",
    "%m/%d/%Y %I:%M:%S %p",
    "%a, %d %b %Y %H:%M:%S GMT",
    "%d/%b/%Y:%H:%M:%S %z",
    "%Y%m%dT%H%M%SZ",
    "%B %d, %Y %H.%M",
    "%d.%m.%y %T",
]
DATES = ["%d.%m.%Y", "%m/%d/%Y", "%Y%m%d", "%d %B %Y"]
COLUMNS = [
    {"name": "id", "type": "bigint", "required": True},
    {"name": "text"},
    {"name": "whole", "type": "int"},
    {"name": "price", "type": "double"},
    {"name": "at", "type": "timestamp"},
    {"name": "day", "type": "date"},
    {"name": "sizes", "type": "array<double>"},
]
NAMES = [str(c["name"]) for c in COLUMNS]
_TEXT = st.text(alphabet="ab \"\\,;|'.é\t", min_size=1, max_size=7)
_MOMENT = st.datetimes(datetime(1972, 1, 1), datetime(2035, 12, 31))


@dataclass(frozen=True)
class Dialect:
    """Form in which a CSV file is written."""

    separator: str
    escape: str | None
    decimal: str
    thousands: str | None
    nulls: tuple[str, ...]
    time: str
    date: str
    line_end: str
    timezone: str
    quote_all: bool

    def source(self) -> dict[str, Any]:
        """Return the keys of `source` that say so."""
        return {
            "format": "csv",
            "separator": self.separator,
            "escape": self.escape,
            "decimal": self.decimal,
            "thousands": self.thousands,
            "null_values": list(self.nulls),
            "timestamps": {"at": self.time, "day": self.date},
            "timezone": self.timezone,
        }


@st.composite
def dialects(draw: st.DrawFn) -> Dialect:
    """Dialects whose signs can be told from each other."""
    decimal = draw(st.sampled_from([".", ","]))
    thousands = draw(st.sampled_from([None, ".", ",", " ", "'"]).filter(lambda sign: sign != decimal))
    return Dialect(
        separator=draw(st.sampled_from([",", ";", "\t"])),
        escape=draw(st.sampled_from([None, "\\", "^"])),
        decimal=decimal,
        thousands=thousands,
        nulls=tuple(draw(st.lists(st.sampled_from(["NA", "\\N", "null", "-"]), unique=True, max_size=3))),
        time=draw(st.sampled_from(TIMES)),
        date=draw(st.sampled_from(DATES)),
        line_end=draw(st.sampled_from(["\n", "\r\n"])),
        timezone=draw(st.sampled_from(["UTC", "Asia/Tokyo"])),
        quote_all=draw(st.booleans()),
    )


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Rows of COLUMNS."""
    price = st.decimals(-(10**9), 10**9, places=2)
    row = st.tuples(
        st.one_of(st.none(), _TEXT),
        st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
        st.one_of(st.none(), price),
        st.one_of(st.none(), _MOMENT),
        st.one_of(st.none(), st.dates(date(1972, 1, 1), date(2035, 12, 31))),
        st.one_of(st.none(), st.lists(price, min_size=1, max_size=3)),
    )
    return [(n, *values) for n, values in enumerate(draw(st.lists(row, min_size=1, max_size=8)), 1)]


def written(records: Sequence[tuple[Any, ...]], dialect: Dialect) -> bytes:
    """Write rows."""

    def number(value: Decimal | int) -> str:
        text = f"{value:,}" if dialect.thousands is not None else f"{value}"
        signs = {",": dialect.thousands or "", ".": dialect.decimal}
        return "".join(signs.get(sign, sign) for sign in text)

    def field(k: int, value: Any) -> str:
        if value is None:
            return dialect.nulls[k % len(dialect.nulls)] if dialect.nulls and k else ""
        if NAMES[k] == "at":
            return f"{value.replace(tzinfo=UTC):{dialect.time}}"
        if NAMES[k] == "day":
            return f"{value:{dialect.date}}"
        if NAMES[k] == "sizes":
            return "|".join(map(number, value))
        return number(value) if isinstance(value, int | Decimal) and NAMES[k] != "id" else str(value)

    def quoted(text: str) -> str:
        signs = (dialect.separator, '"', "\r", "\n")
        if not (dialect.quote_all or any(sign in text for sign in signs)):
            return text
        if dialect.escape is None:
            return '"' + text.replace('"', '""') + '"'
        return '"' + text.replace(dialect.escape, 2 * dialect.escape).replace('"', dialect.escape + '"') + '"'

    lines = [dialect.separator.join(NAMES)]
    lines += [dialect.separator.join(quoted(field(k, v)) for k, v in enumerate(row)) for row in records]
    return "".join(line + dialect.line_end for line in lines).encode()


def read(body: bytes, dialect: Dialect) -> list[tuple[Any, ...]]:
    """Read rows by Python's own means; times in UTC."""
    # Python's own escape has a meaning outside of quotes, too.
    text = body.decode() if dialect.escape is None else _doubled(body.decode(), dialect)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=dialect.separator)
    records = []
    for fields in list(lines)[1:]:
        values = [None if text in ("", *dialect.nulls) else text for text in fields]
        records.append(tuple(_value(name, text, dialect) for name, text in zip(NAMES, values, strict=True)))
    return records


def _doubled(text: str, dialect: Dialect) -> str:
    """Escaped quotes as doubled ones, sign by sign."""
    assert dialect.escape is not None
    parts, inside, position = [], False, 0
    while position < len(text):
        sign, following = text[position], text[position + 1 : position + 2]
        if inside and sign == dialect.escape and following in ('"', dialect.escape):
            parts.append('""' if following == '"' else following)
            position += 2
            continue
        if sign == '"':
            # A field begins with its quote, or has none that counts.
            inside = not inside and (position == 0 or text[position - 1] in (dialect.separator, "\n"))
        parts.append(sign)
        position += 1
    return "".join(parts)


def _value(name: str, text: str | None, dialect: Dialect) -> Any:
    if text is None or name == "text":
        return text

    def number(spelled: str) -> Decimal:
        return Decimal(spelled.replace(dialect.thousands or "\0", "").replace(dialect.decimal, "."))

    if name == "at":
        moment = datetime.strptime(text, dialect.time.replace("%T", "%H:%M:%S"))
        if moment.tzinfo is None:
            ends_utc = dialect.time.endswith(("UTC", "GMT", "Z"))
            moment = moment.replace(tzinfo=UTC if ends_utc else ZoneInfo(dialect.timezone))
        return moment.astimezone(UTC)
    if name == "day":
        return datetime.strptime(text, dialect.date).date()
    if name == "sizes":
        return [float(number(part)) for part in text.split("|")]
    if name == "price":
        return float(number(text))
    return int(number(text)) if name == "whole" else int(text)
