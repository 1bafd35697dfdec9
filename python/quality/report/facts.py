"""Facts of manifests: read where they may be missing or of another shape, and formatted for people.

Manifests of other versions, of stages that did not run and of interrupted runs all end up in a report. So a value of
another type counts as missing: nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def number(value: Any) -> float | None:
    """Return a finite number, or None. Booleans are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    """Return a list or tuple, or an empty one; a text is none."""
    return value if isinstance(value, (list, tuple)) else ()


def records(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings of a list."""
    return [v for v in sequence(value) if isinstance(v, Mapping)]


def numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping, by name."""
    return {str(k): n for k, v in mapping(value).items() if (n := number(v)) is not None}


def points(value: Any, x: str, y: str) -> list[tuple[float, float]]:
    """(x, y) of the records that have both."""
    pairs = ((number(r.get(x)), number(r.get(y))) for r in records(value))
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def show(value: Any) -> str:
    """Format any JSON value: whole numbers with separators, others with at most 4 significant digits."""
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
    """Return a number with that many decimals, or a dash."""
    number_ = number(value)
    return "–" if number_ is None else f"{number_:.{places}f}"


def count(value: Any) -> str:
    """Return a whole number with separators, or a dash."""
    number_ = number(value)
    return "–" if number_ is None else f"{number_:,.0f}"


def percent(value: Any, places: int = 1) -> str:
    """Return a share of 1 as per cent, or a dash."""
    number_ = number(value)
    return "–" if number_ is None else f"{100 * number_:.{places}f} %"


def duration(seconds: Any) -> str:
    """Format seconds for people; a dash without a number."""
    number_ = number(seconds)
    if number_ is None:
        return "–"
    if number_ < 60:
        return f"{number_:.1f} s"
    minutes, rest = divmod(round(number_), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def memory(mib: Any) -> str:
    """Format MiB as MiB or GiB; a dash without a number."""
    number_ = number(mib)
    if number_ is None:
        return "–"
    return f"{number_:,.0f} MiB" if number_ < 1024 else f"{number_ / 1024:.1f} GiB"


def size(count: Any) -> str:
    """Return bytes as KiB, MiB or GiB, or a dash."""
    number_ = number(count)
    if number_ is None:
        return "–"
    for unit, unit_name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number_ >= unit:
            return f"{number_ / unit:,.1f} {unit_name}"
    return f"{number_ / 1024:,.1f} KiB"


def saved_rows(saved: Any) -> str:
    """Describe the saved embeddings of a manifest of `train` (`retrain.full_copy_days`); empty without the facts."""
    embeddings = mapping(saved)
    saved_bytes, full_bytes = number(embeddings.get("embeddings_bytes")), number(embeddings.get("whole_copy_bytes"))
    if saved_bytes is None:
        return ""
    if embeddings.get("base") is None or not full_bytes:
        return f"{size(saved_bytes)}, all rows"
    return f"{size(saved_bytes)} of changed rows, {percent(saved_bytes / full_bytes)} of a whole copy"


def when(moment: datetime | None) -> str:
    """Return a time, UTC, to the second."""
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def short(text: Any, limit: int = 28) -> str:
    """Return a text cut to a length that fits a plot's margin."""
    full_text = str(text)
    return full_text if len(full_text) <= limit else full_text[: limit - 1] + "…"


def ceiling_share(auc: float | None, ceiling: float | None) -> float | None:
    """Return the share of the way from 0.5 to the ceiling that an AUC reaches; None where one is unknown."""
    if auc is None or ceiling is None or ceiling <= 0.5:
        return None
    return (auc - 0.5) / (ceiling - 0.5)
