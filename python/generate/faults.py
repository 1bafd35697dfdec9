"""What goes wrong in a landing file on purpose: lines that no reader may accept, and events that land twice.

Late events and nulls are faults too, but of good rows: headrace.generate.click_model draws them.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.counter_random import Ints, integers, stream, uniform
from headrace.generate.click_model import MAX_ROWS_PER_DAY, ClickModel, events, lag_of
from headrace.generate.purchase_model import purchases
from headrace.generate.serialize import COLUMNS, NULL_TEXT, Format, lines, text, values

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
#: Malformed lines are made from events that the log does not have otherwise.
_FIRST_ROW = MAX_ROWS_PER_DAY // 2
_FROM_DAY_BEFORE = 0.25


def _counter(landing_day: int, number: Ints) -> NDArray[np.uint64]:
    return np.uint64(landing_day << 40) | number.astype(np.uint64)


def malformed_kind(model: ClickModel, landing_day: int, number: Ints) -> Ints:
    """The kind of each malformed line of a day, by its number [n]: indices into MALFORMED."""
    return integers(stream(model.params.seed, "malformed/kind"), _counter(landing_day, number), len(MALFORMED))


def malformed_lines(model: ClickModel, start: date, landing_day: int, number: Ints, fmt: Format) -> Any:
    """Malformed lines of a day, by their numbers [n]: a pyarrow string array [n], each with its `\\n`."""
    seed, n = model.params.seed, len(number)
    counter = _counter(landing_day, number)
    kind = malformed_kind(model, landing_day, number)
    made = events(model, np.full(n, landing_day), _FIRST_ROW + number)
    columns = values(made, start, fmt, purchases(model, made))
    for name, choices in _WRONG.items():
        choice = integers(stream(seed, f"malformed/{name}"), counter, len(choices))
        for k, (column, wrong) in enumerate(choices):
            here = (kind == MALFORMED.index(name)) & (choice == k)
            columns[column] = pc.if_else(pa.array(here), _spelled(wrong, fmt), columns[column])
    far = pa.array(kind == MALFORMED.index("bad_time"))
    columns["ts"] = pc.if_else(far, _bad_times(model, start, landing_day, counter, fmt), columns["ts"])
    found = lines(columns, fmt).to_pylist()
    place = uniform(stream(seed, "malformed/place"), counter)
    for i in np.flatnonzero(kind == MALFORMED.index("broken_line")):
        found[i] = _cut(found[i], float(place[i]), fmt)
    if fmt == "jsonl":
        for i in np.flatnonzero((kind == MALFORMED.index("missing_required")) & (place < 0.5)):
            found[i] = _without_null_keys(found[i])
    return pa.array(found, pa.string())


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
    # From two characters on: an empty line is no row, and `{` plus nothing would still be one.
    return line[: 2 + int(place * (len(line) - 4))] + "\n"


def _without_null_keys(line: str) -> str:
    for column in ("event_id", "user_id", "item_id", "ts"):
        line = line.replace(f'"{column}":null,', "")
    return line


def duplicate_sources(model: ClickModel, landing_day: int, number: Ints, rows: int) -> tuple[Ints, Ints]:
    """Which events land a second time on a day.

    Three of four are events of the same day (of any of its files); the rest landed the day before, and never so late
    then that a day more makes them too late.

    Args:
        model: parameters.
        landing_day: days since the first day.
        number: the duplicates' numbers [n].
        rows: good rows a day.

    Returns:
        landing day of the first copy, its row: int64 [n] each.
    """
    counter = _counter(landing_day, number)
    row = integers(stream(model.params.seed, "duplicate/row"), counter, rows)
    before = np.full(len(number), landing_day - 1)
    wanted = uniform(stream(model.params.seed, "duplicate/before"), counter) < _FROM_DAY_BEFORE
    if landing_day == 0 or model.late_days == 0:
        wanted &= False
    else:
        wanted &= lag_of(model, before, row) < model.late_days
    return np.where(wanted, before, landing_day), row
