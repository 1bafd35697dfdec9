"""The split as a rule over columns, and days as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta


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
        """The split of a day from `first` to `last`."""
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
    """Columns that the rule looks at, besides the rows' source."""
    return () if isinstance(rule, PositionRule) else (rule.column,)


def day_number(day: str) -> int:
    """Days since 1970 of an ISO date."""
    return (date.fromisoformat(day) - date(1970, 1, 1)).days


def day_name(number: int) -> str:
    """The reverse of `day_number`."""
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()
