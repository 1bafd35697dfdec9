"""Statistics of a data file without some values: they have the smallest and largest value of each column."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

#: Characters of a text that statistics keep; what was cut ends with Unicode's last.
_KEPT = 32
_TIE = "\U0010ffff"
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
    begin = value.removesuffix(_TIE)
    return is_one(begin, len(begin) >= _KEPT)
