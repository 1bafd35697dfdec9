"""Reading facts that may be missing or of another shape than expected, and writing them for people.

Manifests of other versions, of stages that did not run and of runs that stopped half-way all end up in a report, so a
value is taken as what it is asked for or not at all: nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None. Booleans are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """A list or tuple, or an empty one; a text is none."""
    return value if isinstance(value, (list, tuple)) else ()


def records(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list."""
    return [v for v in sequence(value) if isinstance(v, Mapping)]


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a mapping, by name."""
    return {str(k): n for k, v in mapping(value).items() if (n := number(v)) is not None}


def points(value: Any, x: str, y: str) -> list[tuple[float, float]]:
    """(x, y) of the records that have both."""
    found = ((number(r.get(x)), number(r.get(y))) for r in records(value))
    return [(a, b) for a, b in found if a is not None and b is not None]


def show(value: Any) -> str:
    """Any JSON value, short: whole numbers with separators, others with at most 4 significant decimals."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(v) for v in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {show(v)}" for k, v in value.items())
    return str(value)


def decimals(value: Any, places: int = 4) -> str:
    """A number with that many decimals, or a dash."""
    found = number(value)
    return "–" if found is None else f"{found:.{places}f}"


def count(value: Any) -> str:
    """A whole number with separators, or a dash."""
    found = number(value)
    return "–" if found is None else f"{found:,.0f}"


def percent(value: Any, places: int = 1) -> str:
    """A share of 1 as per cent, or a dash."""
    found = number(value)
    return "–" if found is None else f"{100 * found:.{places}f} %"


def duration(seconds: Any) -> str:
    """Seconds as people say them, or a dash."""
    found = number(seconds)
    if found is None:
        return "–"
    if found < 60:
        return f"{found:.1f} s"
    minutes, rest = divmod(round(found), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def memory(mib: Any) -> str:
    """MiB as MiB or GiB, or a dash."""
    found = number(mib)
    if found is None:
        return "–"
    return f"{found:,.0f} MiB" if found < 1024 else f"{found / 1024:.1f} GiB"


def size(count: Any) -> str:
    """Bytes as KiB, MiB or GiB, or a dash."""
    found = number(count)
    if found is None:
        return "–"
    for unit, shown in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if found >= unit:
            return f"{found / unit:,.1f} {shown}"
    return f"{found / 1024:,.1f} KiB"


def saved_rows(saved: Any) -> str:
    """What a manifest of `train` says of saved embeddings (`retrain.full_copy_days`); empty where it says nothing."""
    found = mapping(saved)
    mine, whole = number(found.get("embeddings_bytes")), number(found.get("whole_copy_bytes"))
    if mine is None:
        return ""
    if found.get("base") is None or not whole:
        return f"{size(mine)}, all rows"
    return f"{size(mine)} of changed rows, {percent(mine / whole)} of a whole copy"


def when(moment: datetime | None) -> str:
    """A time, UTC, to the second."""
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def short(text: Any, limit: int = 28) -> str:
    """A text cut to a length that fits a plot's margin."""
    found = str(text)
    return found if len(found) <= limit else found[: limit - 1] + "…"


def ceiling_share(auc: float | None, ceiling: float | None) -> float | None:
    """How far from a coin (0.5) to the ceiling a model came; None where one of them is unknown or says nothing."""
    if auc is None or ceiling is None or ceiling <= 0.5:
        return None
    return (auc - 0.5) / (ceiling - 0.5)
