"""Days of a source: when they begin in its time zone, and which of them a run covers."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from headrace.config import AnySource


def days_of_run(source: AnySource, ds: str) -> list[str]:
    """Return the days that a run for `ds` covers, oldest first: of a daily source `catch_up_days` before it, too."""
    earlier_days = source.catch_up_days if source.daily else 0
    return [following(ds, -k) for k in range(earlier_days, -1, -1)]


def midnight(source: AnySource, ds: str) -> datetime:
    """Return the instant in UTC at which a landing day begins in the source's time zone."""
    day = date.fromisoformat(ds)
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(source.timezone)).astimezone(UTC)


def following(ds: str, days: int = 1) -> str:
    """Return the day so many days after (or before) another."""
    return (date.fromisoformat(ds) + timedelta(days=days)).isoformat()
