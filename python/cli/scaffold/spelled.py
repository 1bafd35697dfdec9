"""Spelling of numbers and times in the texts of a file: decimal commas, thousands, the order of day and month."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import TimeFormat
from headrace.lake.landing.convert import dates, timestamps
from headrace.lake.landing.spellings import Spelling

#: Distinct values that a spelling is first tried on, and those that it must then fit.
_PROBE, _TRIED = 8, 50_000
_SIGNS = r"^[+-]?[0-9.,' \x{00a0}\x{202f}]*[0-9][0-9.,' \x{00a0}\x{202f}]*([eE][+-]?[0-9]+)?$"
_ZEROS = r"^[+-]?0[0-9]"
_WHOLE_NUMBER = r"^[+-]?[0-9]+$"
_ZERO_POINT = r"^[+-]?0[.,]"
_CLOCK = r"^([01]?[0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?$"
_CLOCK_OF_HALF_A_DAY = r"^(0?[1-9]|1[0-2]):[0-5][0-9](:[0-5][0-9])? [AaPp][Mm]$"
#: What people write before or behind a number: a currency, or a percent sign.
_CURRENCY = r"(?:[$€£¥₹]|EUR|USD|GBP|CHF)"
_DIGITS = r"[0-9][0-9.,' \x{00a0}\x{202f}]*"
_WITH_SIGN = rf"^[+-]?(?:{_CURRENCY}[ \x{{00a0}}]?[+-]?{_DIGITS}|{_DIGITS}[ \x{{00a0}}]?(?:{_CURRENCY}|%))$"
_NO_PART_OF_A_NUMBER = r"[^0-9.,' \x{00a0}\x{202f}+-]"
_Mark = Literal[".", ","]
_Between = Literal[".", ",", " ", "'"]
_STYLES: tuple[tuple[_Mark, _Between | None], ...] = (
    (".", None),
    (",", None),
    (",", "."),
    (".", ","),
    (",", " "),
    (".", " "),
    (",", "'"),
    (".", "'"),
)

_DAY_FIRST, _MONTH_FIRST = "day first", "month first"
#: (format of a date, its order where day and month could be taken for each other).
_DATES: tuple[tuple[str, str], ...] = (
    *((f"%d{s}%m{s}%{y}", _DAY_FIRST) for s in "./-" for y in "Yy"),
    *((f"%m{s}%d{s}%{y}", _MONTH_FIRST) for s in "./-" for y in "Yy"),
    *((f"%Y{s}%m{s}%d", "") for s in "-/."),
    *((form, "") for form in ("%d %b %Y", "%d-%b-%Y", "%d/%b/%Y", "%d. %b %Y", "%b %d, %Y", "%b %d %Y")),
    *((form, "") for form in ("%d-%b-%y", "%a %b %d %Y", "%a, %d %b %Y", "%Y%m%d")),
)
_CLOCKS = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S.%f",
    " %I:%M %p",
    " %I:%M:%S %p",
    "T%H:%M:%S",
    "T%H:%M",
    ", %H:%M",
    ", %H:%M:%S",
    " %H:%M:%S %z",
    ":%H:%M:%S %z",
    " %H:%M:%S UTC",
    " %H:%M UTC",
    "%H%M%S",
    " %H.%M",
)


@dataclass(frozen=True)
class NumberMarks:
    """Marks in the numbers of a file: before the fraction, and between each three digits."""

    decimal: _Mark = "."
    thousands: _Between | None = None
    #: What a person should know about the choice.
    notes: tuple[str, ...] = ()

    def plain(self, text: pa.Array) -> pa.Array:
        """Return texts of numbers as `ingest` reads them; null for a text that is none."""
        if (self.decimal, self.thousands) == (".", None):
            return text
        return Spelling(self.decimal, self.thousands).plain(text)


def find_marks(columns: Mapping[str, pa.Array], separator: str) -> NumberMarks:
    """Find the marks by which the most columns are numbers.

    Args:
        columns: distinct texts by column, without nulls.
        separator: what stands between the fields of a line; behind a semicolon a comma is a decimal comma.
    """
    fitting: dict[str, set[tuple[_Mark, _Between | None]]] = {}
    columns = {
        n: _without_sign(t) if len(t) and _all(t.slice(0, _TRIED), _WITH_SIGN) else t for n, t in columns.items()
    }
    for name, texts in columns.items():
        texts = texts.slice(0, _TRIED)
        if not len(texts) or not _all(texts, _SIGNS) or _all(texts, _WHOLE_NUMBER) or _any(texts, _ZEROS):
            continue
        styles = {s for s in _STYLES if not Spelling(*s).plain(texts).null_count}
        if styles:
            fitting[name] = styles
    if all(_STYLES[0] in styles for styles in fitting.values()):
        # Behind a zero there is a fraction.
        doubtful = [n for n in fitting if (",", ".") in fitting[n] and not _any(columns[n], _ZERO_POINT)]
        return NumberMarks(notes=_doubts(columns, doubtful, ".", "decimal: ',', thousands: '.'"))
    in_order = _STYLES if separator not in ";\t|" else sorted(_STYLES, key=lambda s: s[0] != ",")
    best = max(in_order, key=lambda style: sum(style in styles for styles in fitting.values()))
    evidence = [n for n, styles in fitting.items() if best in styles]
    rivals = [s for s in _STYLES if s[0] != best[0] and all(s in fitting[n] for n in evidence)]
    notes: list[str] = []
    if rivals:
        decimal, thousands = rivals[0]
        alternative = f"decimal: '{decimal}'" + (f", thousands: '{thousands}'" if thousands else "")
        notes += _doubts(columns, evidence, best[0], alternative)
    if unread := [n for n, styles in fitting.items() if best not in styles]:
        notes.append(f"numbers spelled in another way, and taken as text: {', '.join(unread)}")
    return NumberMarks(best[0], best[1], tuple(notes))


def _doubts(columns: Mapping[str, pa.Array], names: Sequence[str], decimal: str, alternative: str) -> tuple[str, ...]:
    """Return a note where numbers have another value by other marks, and none of them tells which is right."""
    marked = {n: columns[n].filter(pc.match_substring_regex(columns[n], r"[.,]")) for n in names}
    names = [n for n, texts in marked.items() if len(texts)]
    if not names:
        return ()
    example = marked[names[0]][0].as_py()
    kind = ("a fraction", "thousands") if decimal in example else ("thousands", "a fraction")
    return (f"ambiguous: {example!r} in {names[0]!r} has {kind[0]}, or {kind[1]} ({alternative}); no value tells",)


@dataclass(frozen=True)
class SignedNumbers:
    """Numbers of a column of text, each beside a currency or a percent sign."""

    #: A text of the column, such as `12,50 €`.
    example: str
    #: double; null for null.
    values: pa.Array
    #: The mark before the fractions.
    decimal: str

    def expression(self, quoted_name: str) -> str:
        """Return the expression of Spark's SQL that makes numbers of the column of this name."""
        digits = f"regexp_replace({quoted_name}, '[^0-9{self.decimal}+-]', '')"
        if self.decimal == ",":
            digits = f"replace({digits}, ',', '.')"
        return f"try_cast({digits} as double)"


def find_signed_numbers(values: pa.Array, marks: NumberMarks) -> SignedNumbers | None:
    """Return the numbers of a column of text that has a sign beside each, or none of them.

    Args:
        values: text.
        marks: of the file's numbers.
    """
    distinct = pc.unique(values).drop_null()
    if not len(distinct) or not _all(distinct, _WITH_SIGN):
        return None
    plain = marks.plain(_without_sign(values))
    if plain.null_count > values.null_count or not _all(pc.unique(plain).drop_null(), r"^[+-]?[0-9]*[.]?[0-9]*$"):
        return None
    return SignedNumbers(distinct[0].as_py(), plain.cast(pa.float64()), marks.decimal)


def _without_sign(texts: pa.Array) -> pa.Array:
    """Return texts without currencies and percent signs."""
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, _NO_PART_OF_A_NUMBER, ""))


@dataclass(frozen=True)
class SpelledTimes:
    """A column of times, and the format that its texts have."""

    #: In the words of `strptime`.
    format: str
    #: timestamp[us, UTC], or date32.
    values: pa.Array
    #: What says the order of day and month; empty where it is plain.
    evidence: str = ""
    #: Whether another order fits each value, too.
    is_ambiguous: bool = False


def find_times(values: pa.Array) -> SpelledTimes | None:
    """Return the times that a column of text has in one format that is not ISO 8601; None where it has none.

    Args:
        values: text, in the order of the file.
    """
    distinct = pc.unique(values).drop_null()
    if not len(distinct) or not _all(distinct.slice(0, _PROBE), r"^[A-Za-z0-9 .,:/+-]*[0-9][A-Za-z0-9 .,:/+-]*$"):
        return None
    matches = []
    first = distinct[0].as_py()
    for (date_form, order), clock in product(_DATES, _CLOCKS):
        form = date_form + clock
        if not _may_have(first, form) or (clock == "%H%M%S" and date_form != "%Y%m%d"):
            continue
        if _read(distinct.slice(0, _PROBE), form) is not None and _read(distinct, form) is not None:
            matches.append((form, order))
    if not matches:
        return None
    if len(matches) > 1 and {order for _, order in matches} == {_DAY_FIRST, _MONTH_FIRST}:
        return _likelier(values, matches)
    form, order = matches[0]
    read = _read(values, form)
    assert read is not None
    return SpelledTimes(form, read, _evidence(distinct, order) if order else "")


@dataclass(frozen=True)
class TimesOfDay:
    """Times of day in a column of text."""

    #: Seconds since midnight; int64, null for null.
    seconds: pa.Array
    #: How Spark's `try_to_timestamp` reads them.
    spark_format: str


def find_clock(values: pa.Array) -> TimesOfDay | None:
    """Return the times of day in a column of text: `8:26`, `23:59:01`, `08:26 PM`; None where a text is none."""
    distinct = pc.unique(values).drop_null()
    is_half = len(distinct) > 0 and _all(distinct, _CLOCK_OF_HALF_A_DAY)
    if not len(distinct) or not (is_half or _all(distinct, _CLOCK)):
        return None
    parts = pc.extract_regex(values, r"^(?P<h>[0-9]+):(?P<m>[0-9]+)(?::(?P<s>[0-9]+))?(?: (?P<p>[AaPp])[Mm])?$")
    hours, minutes = (parts.field(k).cast(pa.int64()) for k in "hm")
    seconds = pc.if_else(pc.equal(parts.field("s"), ""), "0", parts.field("s")).cast(pa.int64())
    if is_half:
        afternoon = pc.equal(pc.utf8_lower(parts.field("p")), "p")
        hours = pc.add(pc.if_else(pc.equal(hours, 12), 0, hours), pc.if_else(afternoon, 12, 0))
    total = pc.add(pc.multiply(pc.add(pc.multiply(hours, 60), minutes), 60), seconds)
    has_seconds = pc.any(pc.not_equal(parts.field("s"), "")).as_py()
    return TimesOfDay(
        total, ("h" if is_half else "H") + (":mm[:ss]" if has_seconds else ":mm") + (" a" if is_half else "")
    )


def _may_have(text: str, form: str) -> bool:
    """Return whether a text has what a format has besides numbers; cheap, and true of all texts of the format."""
    literals = re.sub("%.", "", form)
    if any(sign not in text for sign in literals):
        return False
    return bool(literals) or text[:8].isdigit()


def _read(texts: pa.Array, form: str) -> pa.Array | None:
    """Return the times of a format; None where a text has another one. Null stays null."""
    spelling = Spelling(time_format=TimeFormat(form))
    plain = spelling.plain(texts)
    if plain.null_count > texts.null_count:
        return None
    times = timestamps(plain, "UTC") if spelling.time_format and spelling.time_format.has_time else dates(plain)
    return times if times.null_count == texts.null_count else None


def _first_numbers(distinct: pa.Array) -> tuple[int, int]:
    """Return the largest first and the largest second number of texts."""
    parts = [re.findall(r"\d+", text)[:2] for text in distinct.to_pylist()]
    return max(int(a) for a, _ in parts), max(int(b) for _, b in parts)


def _evidence(distinct: pa.Array, order: str) -> str:
    first, second = _first_numbers(distinct)
    return f"{order}: the first number goes up to {first}, the second up to {second}"


def _likelier(values: pa.Array, matches: Sequence[tuple[str, str]]) -> SpelledTimes:
    """Return the times by the order of day and month in which they follow each other, else by the usual one."""
    shares, reads = {}, {}
    for form, order in matches:
        times = _read(values, form)
        assert times is not None
        numbers = times.drop_null().cast(pa.int64() if pa.types.is_timestamp(times.type) else pa.int32()).to_numpy()
        reads[order] = (form, times)
        shares[order] = float((np.diff(numbers) >= 0).mean()) if len(numbers) > 1 else 1.0
    first, second = _first_numbers(pc.unique(values).drop_null())
    usual = _MONTH_FIRST if "/" in matches[0][0] else _DAY_FIRST
    alternative = _DAY_FIRST if usual == _MONTH_FIRST else _MONTH_FIRST
    if abs(shares[usual] - shares[alternative]) > 0.02:
        chosen = max(shares, key=lambda order: shares[order])
        rejected = alternative if chosen == usual else usual
        reason = (
            f"{shares[chosen]:.0%} of the times then do not precede the one before them, and {shares[rejected]:.0%} "
            f"with the {rejected}"
        )
    else:
        chosen, rejected = usual, alternative
        reason = f"nothing in the data tells; so are such dates mostly written. Else: {reads[alternative][0]!r}"
    evidence = f"ambiguous: no number is above {max(first, second)}; {chosen} here, as {reason}"
    return SpelledTimes(*reads[chosen], evidence, is_ambiguous=True)


def _all(values: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())


def _any(values: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())
