"""Lines of landing files: events as JSON or CSV, and lines that are malformed on purpose.

Arrow's string kernels format all rows at once, without a Python object per row. JSON: one object a line, keys in the
order of `COLUMNS`, nulls as `null`, tags as a list. CSV (RFC 4180): a header line, fields in the order of `COLUMNS`,
nulls and empty lists of tags as empty fields, tags joined by `|`. Both: UTF-8, `\\n` after each line, `ts` as ISO 8601
in UTC with milliseconds, ids as integers.

Faults are malformed lines, which no reader may accept, and events that land twice. Late events and nulls are in good
rows: headrace.lake.generate.click_model draws them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.compute import pc
from headrace.compute.counter_random import Ints, hexadecimal, integers, stream, uniform
from headrace.lake.generate.click_model import (
    MAX_ROWS_PER_DAY,
    NULLABLE,
    ClickModel,
    Events,
    Purchases,
    events,
    lag_of,
    purchases,
)
from headrace.lake.generate.population import CATEGORIES, COUNTRIES, DEVICES, MAX_TAGS, TAGS

Format = Literal["jsonl", "csv"]

COLUMNS = (
    "event_id",
    "ts",
    "user_id",
    "item_id",
    "clicked",
    "user_age",
    "user_country",
    "user_activity",
    "item_category",
    "item_price",
    "item_age_days",
    "item_tags",
    "device",
    "hour",
)
NULL_TEXT: Mapping[Format, str] = {"jsonl": "null", "csv": ""}

#: Kinds of malformed lines, in the order of `malformed_kind`.
#: broken_line: JSON cut off in the middle, or a CSV line with too few fields.
#: wrong_type: a word where a number or a time belongs.
#: out_of_range: `clicked` 7, `hour` 99 or a negative price.
#: missing_required: no user, item, time or event id (JSON: null, or not even the key).
#: bad_time: the event happened after the landing day, or longer ago than `late_days`.
MALFORMED = ("broken_line", "wrong_type", "out_of_range", "missing_required", "bad_time")
#: (column, text) by kind; an empty text stands for null.
_WRONG = {
    "wrong_type": (("user_id", "u-17"), ("item_price", "free"), ("clicked", "maybe"), ("ts", "soon"), ("hour", "noon")),
    "out_of_range": (("clicked", "7"), ("hour", "99"), ("item_price", "-1.5")),
    "missing_required": (("user_id", ""), ("item_id", ""), ("ts", ""), ("event_id", "")),
}
#: A cut CSV line keeps at most this many fields, so that a required one is always missing.
_CUT_FIELDS = COLUMNS.index("clicked")
#: First row of the events from which malformed lines are made; the log has no such rows otherwise.
_FIRST_ROW = MAX_ROWS_PER_DAY // 2
_FROM_DAY_BEFORE = 0.25


def text(value: str, fmt: Format) -> str:
    """Format a string, with quotes where the format needs them."""
    if fmt == "jsonl":
        return json.dumps(value, ensure_ascii=False)
    return '"' + value.replace('"', '""') + '"' if any(c in value for c in ',"\r\n') else value


def header(columns: Iterable[str], fmt: Format) -> str:
    """Return a file's first line: CSV's column names, nothing for JSON."""
    return ",".join(columns) + "\n" if fmt == "csv" else ""


def values(events: Events, start: date, fmt: Format, bought: Purchases | None) -> dict[str, Any]:
    """Format each column's values.

    Args:
        events: n events.
        start: the log's first day.
        fmt: the format.
        bought: purchases of the events; None: the log has none.

    Returns:
        pyarrow string arrays [n] without nulls, by the names of COLUMNS, then `purchased` if there are purchases.
    """
    user, item = events.users, events.items
    user_rows, item_rows = pa.array(events.user_row), pa.array(events.item_row)
    second = events.millisecond // 1000
    quote = '"' if fmt == "jsonl" else ""
    spelled = {
        "event_id": _joined(quote, _ascii(hexadecimal(events.event_id)), quote),
        "ts": _joined(
            quote,
            _days(events.day, start),
            _clock().take(pa.array(second)),
            _milliseconds().take(pa.array(events.millisecond % 1000)),
            quote,
        ),
        "user_id": _number(user.id).take(user_rows),
        "item_id": _number(item.id).take(item_rows),
        "clicked": _number(events.clicked.astype(np.int8)),
        "user_age": _number(user.age).take(user_rows),
        "user_country": _names(COUNTRIES, fmt).take(pa.array(user.country[events.user_row])),
        "user_activity": _number(user.activity).take(user_rows),
        "item_category": _names(CATEGORIES, fmt).take(pa.array(item.category[events.item_row])),
        "item_price": _number(item.price).take(item_rows),
        "item_age_days": _number(np.round(events.item_age, 3)),
        "item_tags": _tags(item.tags, fmt).take(item_rows),
        "device": _names(DEVICES, fmt).take(pa.array(events.device)),
        "hour": _number(second // 3600),
    }
    for k, name in enumerate(NULLABLE):
        spelled[name] = pc.if_else(pa.array(events.null[:, k]), NULL_TEXT[fmt], spelled[name])
    if bought is not None:
        spelled["purchased"] = _number(bought.purchased.astype(np.int8))
    return spelled


def lines(columns: Mapping[str, Any], fmt: Format) -> Any:
    """Join what `values` returns to lines: a pyarrow string array [n], each with its `\\n`."""
    pieces: list[Any] = []
    for k, name in enumerate(columns):
        if fmt == "jsonl":
            pieces.append(f'{"," if k else "{"}"{name}":')
        elif k:
            pieces.append(",")
        pieces.append(columns[name])
    return _joined(*pieces, "}\n" if fmt == "jsonl" else "\n")


def _joined(*pieces: Any) -> Any:
    return pc.binary_join_element_wise(*pieces, "")


def _number(numbers: NDArray[Any]) -> Any:
    """Format numbers as the shortest text that parses as the same number."""
    return pc.cast(pa.array(numbers), pa.string())


def _ascii(fixed: NDArray[np.bytes_]) -> Any:
    """Return bytes of one length each, `S<k>` [n], as a string array, without a copy per row."""
    width = fixed.dtype.itemsize
    offsets = np.arange(len(fixed) + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.string(), len(fixed), [None, pa.py_buffer(offsets), pa.py_buffer(fixed)])


@lru_cache(maxsize=16)
def _names(names: Sequence[str], fmt: Format) -> Any:
    return pa.array([text(name, fmt) for name in names])


def _tags(tags: Ints, fmt: Format) -> Any:
    """Format lists of tags, [n, MAX_TAGS], padded with -1 at their ends."""
    pieces: list[Any] = ["["] if fmt == "jsonl" else []
    for k in range(MAX_TAGS):
        separator = "" if k == 0 else "," if fmt == "jsonl" else "|"
        spelled = pa.array([separator + text(tag, fmt) for tag in TAGS] + [""])
        pieces.append(spelled.take(pa.array(np.where(tags[:, k] < 0, len(TAGS), tags[:, k]))))
    return _joined(*pieces, *(["]"] if fmt == "jsonl" else []))


def _days(day: Ints, start: date) -> Any:
    first, last = int(day.min(initial=0)), int(day.max(initial=0))
    names = pa.array([(start + timedelta(days=d)).isoformat() for d in range(first, last + 1)])
    return names.take(pa.array(day - first))


@lru_cache(maxsize=1)
def _clock() -> Any:
    """Return `THH:MM:SS` of each second of a day."""
    return pa.array([f"T{s // 3600:02d}:{s // 60 % 60:02d}:{s % 60:02d}" for s in range(86_400)])


@lru_cache(maxsize=1)
def _milliseconds() -> Any:
    return pa.array([f".{m:03d}Z" for m in range(1000)])


def _line_counter(landing_day: int, number: Ints) -> NDArray[np.uint64]:
    return np.uint64(landing_day << 40) | number.astype(np.uint64)


def malformed_kind(model: ClickModel, landing_day: int, number: Ints) -> Ints:
    """Return the kind of each malformed line of a day, by its number [n]: indices into MALFORMED."""
    return integers(stream(model.params.seed, "malformed/kind"), _line_counter(landing_day, number), len(MALFORMED))


def malformed_lines(model: ClickModel, start: date, landing_day: int, number: Ints, fmt: Format) -> Any:
    """Make malformed lines of a day, by their numbers [n]: a pyarrow string array [n], each with its `\\n`."""
    seed, n = model.params.seed, len(number)
    counter = _line_counter(landing_day, number)
    kind = malformed_kind(model, landing_day, number)
    sources = events(model, np.full(n, landing_day), _FIRST_ROW + number)
    columns = values(sources, start, fmt, purchases(model, sources))
    for name, choices in _WRONG.items():
        choice = integers(stream(seed, f"malformed/{name}"), counter, len(choices))
        for k, (column, wrong) in enumerate(choices):
            replaced = (kind == MALFORMED.index(name)) & (choice == k)
            columns[column] = pc.if_else(pa.array(replaced), _spelled(wrong, fmt), columns[column])
    far = pa.array(kind == MALFORMED.index("bad_time"))
    columns["ts"] = pc.if_else(far, _bad_times(model, start, landing_day, counter, fmt), columns["ts"])
    malformed = lines(columns, fmt).to_pylist()
    place = uniform(stream(seed, "malformed/place"), counter)
    for i in np.flatnonzero(kind == MALFORMED.index("broken_line")):
        malformed[i] = _cut(malformed[i], float(place[i]), fmt)
    if fmt == "jsonl":
        for i in np.flatnonzero((kind == MALFORMED.index("missing_required")) & (place < 0.5)):
            malformed[i] = _without_null_keys(malformed[i])
    return pa.array(malformed, pa.string())


def _spelled(wrong: str, fmt: Format) -> str:
    if not wrong:
        return NULL_TEXT[fmt]
    return wrong if wrong.lstrip("-").replace(".", "").isdigit() else text(wrong, fmt)


def _bad_times(model: ClickModel, start: date, landing_day: int, counter: NDArray[np.uint64], fmt: Format) -> Any:
    far = 1 + integers(stream(model.params.seed, "malformed/days"), counter, 30)
    future = uniform(stream(model.params.seed, "malformed/future"), counter) < 0.5
    noon = datetime(start.year, start.month, start.day, 12, tzinfo=UTC)
    days = landing_day + np.where(future, far, -far - model.late_days)
    return pa.array(
        [text((noon + timedelta(days=int(d))).strftime("%Y-%m-%dT%H:%M:%S.000Z"), fmt) for d in days], pa.string()
    )


def _cut(line: str, place: float, fmt: Format) -> str:
    if fmt == "csv":
        return ",".join(line.split(",")[: 1 + int(place * (_CUT_FIELDS - 1))]) + "\n"
    # Keep at least two characters: readers ignore an empty line.
    return line[: 2 + int(place * (len(line) - 4))] + "\n"


def _without_null_keys(line: str) -> str:
    for column in ("event_id", "user_id", "item_id", "ts"):
        line = line.replace(f'"{column}":null,', "")
    return line


def duplicate_sources(model: ClickModel, landing_day: int, number: Ints, rows: int) -> tuple[Ints, Ints]:
    """Choose the events that land a second time on a day.

    Three of four are events of the same day (of any of its files). The rest landed the day before, early enough not to
    be too late a day later.

    Args:
        model: parameters.
        landing_day: days since the first day.
        number: the duplicates' numbers [n].
        rows: good rows a day.

    Returns:
        landing day of the first copy, its row: int64 [n] each.
    """
    counter = _line_counter(landing_day, number)
    row = integers(stream(model.params.seed, "duplicate/row"), counter, rows)
    day_before = np.full(len(number), landing_day - 1)
    is_from_day_before = uniform(stream(model.params.seed, "duplicate/before"), counter) < _FROM_DAY_BEFORE
    if landing_day == 0 or model.late_days == 0:
        is_from_day_before &= False
    else:
        is_from_day_before &= lag_of(model, day_before, row) < model.late_days
    return np.where(is_from_day_before, day_before, landing_day), row
