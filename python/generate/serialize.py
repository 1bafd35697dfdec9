"""Events as lines of JSON or CSV, all rows at a time in Arrow's string kernels (no Python object a row).

JSON: one object a line, keys in the order of `COLUMNS`, nulls as `null`, tags as a list. CSV (RFC 4180): a header
line, fields in the order of `COLUMNS`, nulls as nothing, tags joined by `|`, no tags as nothing. Both: UTF-8, `\\n`
after each line, `ts` as ISO 8601 in UTC with milliseconds, ids as integers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.counter_random import Ints, hexadecimal
from headrace.generate.click_model import NULLABLE, Events
from headrace.generate.population import CATEGORIES, COUNTRIES, DEVICES, MAX_TAGS, TAGS
from headrace.generate.purchase_model import Purchases

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


def text(value: str, fmt: Format) -> str:
    """A string as the format spells it, quoted where it must be."""
    if fmt == "jsonl":
        return json.dumps(value, ensure_ascii=False)
    return '"' + value.replace('"', '""') + '"' if any(c in value for c in ',"\r\n') else value


def header(columns: Iterable[str], fmt: Format) -> str:
    """What a file begins with."""
    return ",".join(columns) + "\n" if fmt == "csv" else ""


def values(events: Events, start: date, fmt: Format, bought: Purchases | None) -> dict[str, Any]:
    """Each column's values as the format spells them.

    Args:
        events: n events.
        start: the log's first day.
        fmt: the format.
        bought: of the events; None: the log has no purchases.

    Returns:
        by the names of COLUMNS, and `purchased` behind them where there are purchases: pyarrow string arrays [n]
        without nulls.
    """
    user, item = events.users, events.items
    of_user, of_item = pa.array(events.user_row), pa.array(events.item_row)
    second = events.millisecond // 1000
    quote = '"' if fmt == "jsonl" else ""
    found = {
        "event_id": _joined(quote, _ascii(hexadecimal(events.event_id)), quote),
        "ts": _joined(
            quote,
            _days(events.day, start),
            _clock().take(pa.array(second)),
            _milliseconds().take(pa.array(events.millisecond % 1000)),
            quote,
        ),
        "user_id": _number(user.id).take(of_user),
        "item_id": _number(item.id).take(of_item),
        "clicked": _number(events.clicked.astype(np.int8)),
        "user_age": _number(user.age).take(of_user),
        "user_country": _names(COUNTRIES, fmt).take(pa.array(user.country[events.user_row])),
        "user_activity": _number(user.activity).take(of_user),
        "item_category": _names(CATEGORIES, fmt).take(pa.array(item.category[events.item_row])),
        "item_price": _number(item.price).take(of_item),
        "item_age_days": _number(np.round(events.item_age, 3)),
        "item_tags": _tags(item.tags, fmt).take(of_item),
        "device": _names(DEVICES, fmt).take(pa.array(events.device)),
        "hour": _number(second // 3600),
    }
    for k, name in enumerate(NULLABLE):
        found[name] = pc.if_else(pa.array(events.null[:, k]), NULL_TEXT[fmt], found[name])
    if bought is not None:
        found["purchased"] = _number(bought.purchased.astype(np.int8))
    return found


def lines(columns: Mapping[str, Any], fmt: Format) -> Any:
    """Values as `values` gives them, joined to lines: a pyarrow string array [n], each with its `\\n`."""
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
    """Shortest text that reads back as the same number."""
    return pc.cast(pa.array(numbers), pa.string())


def _ascii(fixed: NDArray[np.bytes_]) -> Any:
    """Bytes of one length each, `S<k>` [n], as a string array, without a copy a row."""
    width = fixed.dtype.itemsize
    offsets = np.arange(len(fixed) + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.string(), len(fixed), [None, pa.py_buffer(offsets), pa.py_buffer(fixed)])


@lru_cache(maxsize=16)
def _names(names: Sequence[str], fmt: Format) -> Any:
    return pa.array([text(name, fmt) for name in names])


def _tags(tags: Ints, fmt: Format) -> Any:
    """Lists of tags, [n, MAX_TAGS] with -1 where there is none, none before one."""
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
    """`THH:MM:SS` of each second of a day."""
    return pa.array([f"T{s // 3600:02d}:{s // 60 % 60:02d}:{s % 60:02d}" for s in range(86_400)])


@lru_cache(maxsize=1)
def _milliseconds() -> Any:
    return pa.array([f".{m:03d}Z" for m in range(1000)])
