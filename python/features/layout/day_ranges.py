"""Which days (UTC) train and which validate, of a split by time."""

from __future__ import annotations

from datetime import date, timedelta

from headrace.config import Features, Spec
from headrace.features.layout.label_horizon import last_labelled_day

#: First and last day, as ISO dates.
DayRange = tuple[str, str]


def time_ranges(features: Features, ds: str) -> tuple[DayRange, DayRange]:
    """(train, valid): the `window_days` before the last `valid_days` up to `ds`; first and last day of each.

    The `test_days` up to `ds` come behind both.
    """
    last = date.fromisoformat(ds) - timedelta(days=features.split.test_days)
    valid_from = last - timedelta(days=features.split.valid_days - 1)
    train_to = valid_from - timedelta(days=1)
    train_from = train_to - timedelta(days=features.window_days - 1)
    return (train_from.isoformat(), train_to.isoformat()), (valid_from.isoformat(), last.isoformat())


def split_ranges(spec: Spec, ds: str) -> tuple[DayRange, DayRange]:
    """`time_ranges` up to the last day up to `ds` whose events have labels by then."""
    return time_ranges(spec.features, last_labelled_day(spec, ds))
