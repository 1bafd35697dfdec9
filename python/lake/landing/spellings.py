"""Spellings of numbers and times: a column's texts as the plain texts that headrace reads.

A plain number has digits, a dot before its fraction and no signs between thousands; a plain time is ISO 8601. A text
that is not spelled as declared becomes null, never another value. No number goes through a float.

Formats of times are those of `strptime` (C, Python, DuckDB, pyarrow):

  %Y %y              year, of four digits; of two: 69 to 99 are of the twentieth century
  %m %d              month, day: one digit or two; two where another number stands at once beside it
  %b %B %a %A        names of months and of days of the week, in English, short or whole, in any case
  %H %I %M %S        hour (24), hour (12, with %p), minute, second
  %p                 AM or PM
  %f                 fraction of a second, 1 to 9 digits; what is beyond microseconds is cut
  %z                 offset from UTC: Z, +01, +0100 or +01:00
  %Z                 UTC, GMT or Z
  %F %D %T %R %%     %Y-%m-%d, %m/%d/%y, %H:%M:%S, %H:%M and a percent sign

Anything else stands for itself. A format that ends with the text UTC, GMT or Z is of UTC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import TimeFormat, decimal_digits

if TYPE_CHECKING:  # Tasks that read lines import this module, but no classes of specs: they take long to make.
    from headrace.config import AnySource, Table

_MONTHS = (
    *("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_PARTS = {
    "Y": "[0-9]{4}", "y": "[0-9]{2}", "b": "[A-Za-z]+", "a": "[A-Za-z]+", "p": "[AaPp][Mm]", "f": "[0-9]{1,9}",
    "z": "Z|[+-][0-9]{2}(?::?[0-9]{2})?", "Z": "UTC|GMT|Z",
}  # fmt: skip
_NUMBERS = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double"})
#: Blanks that typesetters put between thousands.
_BLANKS = " \u00a0\u202f"


@dataclass(frozen=True)
class Spelling:
    """Spelling of the texts of one column."""

    #: Before the fraction of a number.
    decimal: str = "."
    #: Between groups of three digits; a blank is also one that does not break. None: nothing.
    thousands: str | None = None
    #: Of times and dates; None: the column has numbers.
    time_format: TimeFormat | None = None

    def plain(self, text: pa.StringArray) -> pa.StringArray:
        """Return plain texts; null for null, and for a text that is spelled otherwise."""
        return self._number(text) if self.time_format is None else self._time(text, self.time_format)

    def _number(self, text: pa.StringArray) -> pa.StringArray:
        groups = ""
        if self.thousands is not None:
            between = f"[{_BLANKS}]" if self.thousands == " " else re.escape(self.thousands)
            groups = f"[0-9]{{1,3}}(?:{between}[0-9]{{3}})+|"
        number = f"^[+-]?(?:{groups}[0-9]*)(?:{re.escape(self.decimal)}[0-9]*)?(?:[eE][+-]?[0-9]+)?$"
        text = pc.if_else(pc.match_substring_regex(text, number), text, None)
        if self.thousands is not None:
            text = pc.replace_substring_regex(text, between, "")
        return text if self.decimal == "." else pc.replace_substring(text, self.decimal, ".")

    def _time(self, text: pa.StringArray, form: TimeFormat) -> pa.StringArray:
        parts = pc.extract_regex(text, self._pattern)

        def part(name: str, width: int = 2) -> pa.StringArray:
            return pc.utf8_lpad(pc.utf8_trim_whitespace(parts.field(name)), width, "0")

        is_match = parts.is_valid()
        if "Y" in form.directives:
            year = parts.field("Y")
        else:
            year = pc.binary_join_element_wise(pc.if_else(pc.greater_equal(part("y"), "69"), "19", "20"), part("y"), "")
        month = part("m") if "m" in form.directives else self._month(parts.field("b"))
        pieces = [year, "-", month, "-", part("d")]
        if form.has_time:
            zero = pa.scalar("00")
            hour = part("H") if "H" in form.directives else zero
            if "I" in form.directives:
                hour = self._hour(part("I"), pc.utf8_lower(parts.field("p")))
            minute, second = (part(k) if k in form.directives else zero for k in "MS")
            pieces += ["T", hour, ":", minute, ":", second]
            if "f" in form.directives:
                pieces += [".", pc.utf8_slice_codeunits(pc.utf8_rpad(parts.field("f"), 6, "0"), 0, 6)]
            if "z" in form.directives:
                offset = pc.replace_substring_regex(parts.field("z"), r"^([+-]\d\d)$", r"\1:00")
                pieces.append(pc.replace_substring_regex(offset, r"^([+-]\d\d)(\d\d)$", r"\1:\2"))
            elif form.is_utc:
                pieces.append("Z")
        return pc.if_else(is_match, pc.binary_join_element_wise(*pieces, ""), None)

    @cached_property
    def _pattern(self) -> str:
        """The regular expression (RE2) of the format, a named group for each directive."""
        assert self.time_format is not None
        tokens = self.time_format.tokens
        pieces = []
        for k, (directive, text) in enumerate(tokens):
            if directive is None:
                pieces.append(re.escape(text))
                continue
            neighbours = {tokens[j][0] for j in (k - 1, k + 1) if 0 <= j < len(tokens)}
            digits = (
                "[0-9]{2}" if neighbours & set("YymdHIMSf") else " ?[0-9]{1,2}" if directive == "d" else "[0-9]{1,2}"
            )
            inside = _PARTS.get(directive, digits)
            pieces.append(f"(?P<{directive}>{inside})")
        return f"^{''.join(pieces)}$"

    @staticmethod
    def _month(name: pa.StringArray) -> pa.StringArray:
        place = pc.index_in(pc.utf8_lower(name), pa.array(_MONTHS))
        return pa.array([f"{k % 12 + 1:02d}" for k in range(len(_MONTHS))]).take(place)

    @staticmethod
    def _hour(hour: pa.StringArray, half: pa.StringArray) -> pa.StringArray:
        place = pc.index_in(pc.binary_join_element_wise(hour, half, ""), pa.array(_HALF_DAYS))
        return pa.array([f"{k:02d}" for k in range(24)]).take(place)


#: Hours of a day by the twelve-hour clock, from midnight on.
_HALF_DAYS = [f"{hour:02d}{half}" for half in ("am", "pm") for hour in (12, *range(1, 12))]


def spellings_of(source: AnySource, table: Table) -> dict[str, Spelling]:
    """Return, by declared column, how the source spells it; columns that are spelled plainly are left out."""
    spellings = {}
    for column in table.columns:
        form = source.time_format(column.name)
        element = column.type.removeprefix("array<").removesuffix(">")
        is_number = element in _NUMBERS or decimal_digits(element) is not None or source.epoch_unit(column.name)
        if form is not None:
            spellings[column.name] = Spelling(time_format=form)
        elif is_number and source.number_marks != (".", None):
            spellings[column.name] = Spelling(*source.number_marks)
    return spellings
