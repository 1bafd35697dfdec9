"""Statistics of a data file without some values: they have the smallest and largest value of each column."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

#: UTF-16 units of a text that statistics keep. A largest value that was cut ends with a character above the one that
#: came there: Unicode's last, or where that one was of ASCII, ASCII's last
#: (org.apache.spark.sql.delta.stats.StatisticsCollection.truncateMaxStringAgg).
_KEPT = 32
_TIES = ("\U0010ffff", "\x7f")
#: By column: whether a smallest or largest value, or the beginning of a longer text, is or has one of the values.
Values = Mapping[str, Callable[[Any, bool], bool]]
#: Where statistics have the smallest and the largest values.
SIDES = ("minValues", "maxValues")


def exactly(texts: frozenset[str]) -> Callable[[Any, bool], bool]:
    """For `Values`: of a column that has such values, text or integers."""

    def is_one(value: Any, cut: bool) -> bool:
        return str(value) in texts or (cut and any(t.startswith(value) for t in texts))

    return is_one


def without_values(text: str, values: Values) -> str:
    """Statistics as JSON; a column of which the smallest or the largest value must go loses both."""
    stats = json.loads(text)
    sides = {side: stats[side] for side in SIDES if isinstance(stats.get(side), dict)}
    gone = {c for of in sides.values() for c, is_one in values.items() if c in of and is_value(of[c], is_one)}
    if not gone:
        return text
    clean = stats | {side: {c: v for c, v in of.items() if c not in gone} for side, of in sides.items()}
    return json.dumps(clean, separators=(",", ":"), ensure_ascii=False)


def is_value(value: Any, is_one: Callable[[Any, bool], bool]) -> bool:
    """Whether a smallest or largest value, as statistics have it, must go."""
    if value is None:
        return False
    if not isinstance(value, str):
        return is_one(value, False)
    # One unit less, where the cut would have parted a pair of them.
    if is_one(value, _units(value) >= _KEPT - 1):
        return True
    begin = value[:-1]
    return value.endswith(_TIES) and is_one(begin, _units(begin) >= _KEPT - 1)


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
