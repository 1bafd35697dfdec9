"""Splits without Spark: a split as a rule over columns, days as numbers, the days (UTC) of each split.

The days of a split by time end with the last day whose events have labels that no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from headrace.config import Features, Spec
from headrace.config.source import following
from headrace.config.source import midnight as landing_midnight
from headrace.features.table_ops.preparation import Preparation, midnight


@dataclass(frozen=True)
class TimeRule:
    """Train from `first`, valid from `valid`, test from `test` (None: none), all to `last`, which is included.

    Days since 1970 in UTC of `column`.
    """

    column: str
    first: int
    valid: int
    last: int
    test: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are, oldest first."""
        return ("train", "valid") if self.test is None else ("train", "valid", "test")

    def split_of(self, day: int) -> str:
        """Return the split of a day from `first` to `last`."""
        if self.test is not None and day >= self.test:
            return "test"
        return "valid" if day >= self.valid else "train"


@dataclass(frozen=True)
class PositionRule:
    """Valid begins at this line of this file, in order of file and line; None: nowhere."""

    file: str | None
    line: int


@dataclass(frozen=True)
class ColumnRule:
    """The text of `column` names the split."""

    column: str


Rule = TimeRule | PositionRule | ColumnRule


def columns_of(rule: Rule) -> tuple[str, ...]:
    """Return columns that the rule looks at, besides the rows' source."""
    return () if isinstance(rule, PositionRule) else (rule.column,)


def day_number(day: str) -> int:
    """Return days since 1970 of an ISO date."""
    return (date.fromisoformat(day) - date(1970, 1, 1)).days


def day_name(number: int) -> str:
    """Return the reverse of `day_number`."""
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


#: First and last day, as ISO dates.
DayRange = tuple[str, str]


def time_ranges(features: Features, ds: str) -> tuple[DayRange, DayRange]:
    """Return (train, valid): the `window_days` before the last `valid_days` up to `ds`; first and last day of each.

    The `test_days` up to `ds` come behind both.
    """
    last = date.fromisoformat(ds) - timedelta(days=features.split.test_days)
    valid_from = last - timedelta(days=features.split.valid_days - 1)
    train_to = valid_from - timedelta(days=1)
    train_from = train_to - timedelta(days=features.window_days - 1)
    return (train_from.isoformat(), train_to.isoformat()), (valid_from.isoformat(), last.isoformat())


def split_ranges(spec: Spec, ds: str) -> tuple[DayRange, DayRange]:
    """Return the `time_ranges` up to the last day up to `ds` whose events have labels by then."""
    return time_ranges(spec.features, last_labelled_day(spec, ds))


def seen_until(spec: Spec, ds: str) -> int | None:
    """Return the microsecond up to which the source of the labels tells what happened by the end of `ds`.

    None: labels are not made of another source, or of one without days: then it tells up to its newest row.
    """
    source = Preparation.from_spec(spec).label_source
    if source is None or not (spec.source.daily and spec.sources[source].source.daily):
        return None
    end = landing_midnight(spec.sources[source].source, following(ds))
    return min(midnight(ds, 1), int(end.timestamp()) * 1_000_000)


def last_labelled_day(spec: Spec, ds: str) -> str:
    """Return the last day (UTC) up to `ds` some of whose events have labels that stay."""
    wait = Preparation.from_spec(spec).label_wait
    if not wait:
        return ds
    # Labels of events before this instant are known.
    until = (seen_until(spec, ds) or midnight(ds, 1)) - wait
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=until - 1)).date().isoformat()
