"""States of judged rows, and the words in which reasons say what is wrong with them.

The judge of landing lines (headrace.lake.landing.unsure_lines) and that of rows of tables in Spark
(headrace.lake.landing.table_days) use them.
"""

from __future__ import annotations

from headrace.config.schema import TableColumn

#: `_state` of a judged row.
GOOD, BAD, SKIPPED = 0, 1, 2
#: Of a row that must not come back (headrace.lake.forgotten).
FORGOTTEN = 3

NOT_UTF8 = "not UTF-8 text"
NOT_JSON = "not a JSON object"
WRONG_FIELDS = "wrong number of fields"
#: Ends the reason of a row whose JSON object has several members for one name.
AMBIGUOUS = ": several fields have this name or differ from it in case alone; name one exactly, by path"
#: Characters of a value that a reason quotes.
SHOWN_CHARACTERS = 100


def a_type(type_: str) -> str:
    """Return `a bigint` or `an int`, for messages."""
    return f"an {type_}" if type_[0] in "aeiou" else f"a {type_}"


def kind_unreadable(column: TableColumn) -> str:
    """Return the kind of reason of a value that is not of its type."""
    return f"{column.name}: not {a_type(column.type)}"


def kind_missing(column: TableColumn) -> str:
    """Return the kind of reason of a required column without a value."""
    return f"{column.name}: required, but null"


def kind_outside(column: str, low: float | None, high: float | None) -> str:
    """Return the kind of reason of a value outside its range; None: no limit."""
    return f"{column}: {span_outside(low, high)}"


def span_outside(low: float | None, high: float | None) -> str:
    """Return `outside [0, 23]`."""
    return f"outside [{'' if low is None else f'{low:g}'}, {'' if high is None else f'{high:g}'}]"


def most_bytes(limit: int) -> str:
    """Return what a reason says of an id that is too long."""
    return f"an id has at most {limit:,} bytes"


def kind_nul(column: str, is_id: bool) -> str:
    """Return the kind of reason of a text with a NUL character."""
    return f"{column}: {'an id' if is_id else 'a text'} has a NUL character"


def kind_empty(column: str) -> str:
    """Return the kind of reason of an id that is the empty text."""
    return f"{column}: an id is empty"


def half_pair(column: str) -> str:
    """Return the reason of an id that has half a surrogate pair."""
    return f"{column}: an id has half a surrogate pair"


def untimely_faults(late_days: int) -> tuple[str, str]:
    """Return what a reason says of an event that is too late, and of one from after its day."""
    return f"more than {late_days} day{'' if late_days == 1 else 's'} late", "after the end of the day"
