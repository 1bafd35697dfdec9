"""What a warehouse must do to take a day's scores: stage, audit, swap, the current view, retention, grants.

with open_target(spec, ws) as target:
    target.create(df.dtypes)
    with target.stage(df, ds, key) as staged:
        checks = audit(staged, limits)
        if all(check.ok for check in checks):
            target.swap(staged, source, checks)
        else:
            target.keep(staged)
    target.grant(spec.publish.grants)
    target.retain(spec.publish.retain_days)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from headrace.config import Spec
from headrace.publish.unfit_keys import KeyLimits
from headrace.storage import LeaseLost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: A value of the user's or the item's key.
Key = int | str


@dataclass(frozen=True)
class Check:
    """One finding. `value` and `limit` as shown to people; `detail` names offenders where it failed."""

    name: str
    value: float
    limit: str
    ok: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.value:g}, must be {self.limit}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Publication:
    """The record of a day that was published."""

    key: str
    rows: int
    #: The checks that held, as JSON values.
    audit: list[dict[str, Any]]


@dataclass(frozen=True)
class PublishedDay:
    """A day that readers see, as an audit may ask for it."""

    ds: str
    rows: int
    #: Its rows alone, as `FROM` takes them: a table, or a query in parentheses with an alias.
    relation: str


class StagedDay(Protocol):
    """A day's scores in staging: nobody reads them, and queries of an audit do.

    The SQL of an audit is what all warehouses understand: it names columns by `quote`, the day by `day`, and aliases
    each derived table.
    """

    ds: str
    #: Of the run.
    key: str
    #: Rows that were written to staging.
    rows: int
    #: The newest published day before this one, None where there is none.
    previous: PublishedDay | None

    @property
    def label(self) -> str:
        """Where it is, for people."""
        ...

    @property
    def relation(self) -> str:
        """The staged rows as `FROM` takes them."""
        ...

    @property
    def day(self) -> str:
        """`ds` as a literal of the type that the warehouse's column `ds` has."""
        ...

    def quote(self, name: str) -> str:
        """A column's name as an identifier of the warehouse's SQL."""
        ...

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of one SELECT statement, which may read `relation` and `previous.relation`."""
        ...


class Target(Protocol):
    """An open warehouse, for the scores table of one pipeline. A reader sees a day as it was, or as it is published.

    What changes it raises LeaseLost, and changes nothing, where a later holder of the pipeline's lease has been at work
    there: docs/storage.md says how far each warehouse can hold to that.
    """

    #: As people write the table, and its kind in manifests.
    label: str
    kind: str
    #: The server and the account on it, for people; `embedded` for our own.
    address: str

    def claim(self) -> None:
        """Have changes of earlier runs that stand still refused from now on, as far as the warehouse can."""
        return

    def key_limits(self, column: str) -> KeyLimits:
        """Return what the table holds of a key's text. `column`: that of the user key, or of the item key."""
        return KeyLimits()

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        """Make the table and its current view where there are none; add columns that the scores have gained.

        Args:
            spark_types: (column, Spark's `simpleString` of its type).

        Raises:
            UserError: the warehouse cannot hold them, or there is a table of that name with others.
        """
        ...

    def stage(self, df: DataFrame, ds: str, key: str) -> AbstractContextManager[StagedDay]:
        """Write the day's scores to staging; dropped at the end of the block unless they were swapped or kept.

        Args:
            df: the scores, from a Spark session.
            ds: their day.
            key: of the run, recorded.

        Raises:
            UserError: another process publishes the same day, or a row cannot be written.
        """
        ...

    def swap(self, staged: StagedDay, source: str, checks: Sequence[Check]) -> None:
        """Make the staged rows the day's rows, and record the publication. Once `published` names the run, they are.

        Args:
            staged: of `stage`, in its block.
            source: where the rows come from, recorded.
            checks: what the audit found, recorded.
        """
        ...

    def keep(self, staged: StagedDay) -> None:
        """Leave the staged rows for a look, until the day is staged again or `drop_kept` is called."""
        ...

    def kept(self, days: Sequence[str] | None = None) -> list[str]:
        """The labels of what `keep` left (of these days alone)."""
        ...

    def drop_kept(self, days: Sequence[str] | None = None) -> list[str]:
        """Drop what `keep` left (of these days alone). Returns the labels."""
        ...

    def published(self, ds: str) -> Publication | None:
        """The record of a day; None where it has not been published."""
        ...

    def days(self) -> list[str]:
        """The days that have been published and not dropped, oldest first."""
        ...

    def count(self, ds: str) -> int:
        """The day's rows in the table."""
        ...

    def missing(self, ds: str, key: str) -> str | None:
        """Why the day's rows are not those of the run `key`, or None."""
        found = self.published(ds)
        if found is None:
            return f"{self.label} has no publication for {ds}"
        if found.key != key:
            return f"{self.label} holds another run's rows for {ds}"
        rows = self.count(ds)
        if rows != found.rows:
            return f"{self.label} has {rows:,} rows for {ds}, and {found.rows:,} were published"
        return None

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        """The first rows of a day, by key: column -> value. Raises UserError where there is no table."""
        ...

    def drop_days(self, days: Sequence[str]) -> None:
        """Drop days and their records: first the rows disappear, whole, then their space."""
        ...

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        """By day, the published rows with one of these keys in a column; days without any are left out."""
        ...

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        """Files that have such rows, or such values in statistics, though it be of no published day; 0 in a database.

        Of days that were dropped or published again, and of processes that were killed.
        """
        return 0

    @property
    def not_reached(self) -> str:
        """What of a server that headrace does not run may still have erased rows, for the proof; empty: nothing."""
        return ""

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        """Remove these rows of all days, and the leftovers; days stay published, by the same runs, with fewer rows.

        Returns:
            what is left to be done by hand; nothing, most often.
        """
        ...

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        """Give roles their rights on the table and its current view; take away what was given before and is not named.

        Args:
            grants: privilege (`select`) -> roles.

        Raises:
            UserError: the warehouse has no roles, and some are named.
        """
        ...


def lease_lost(label: str) -> LeaseLost:
    """What is raised where a later holder has been at work on a table."""
    return LeaseLost(
        f"{label}: a later run of the pipeline has been at work there since this one began; nothing of this one was "
        f"published. See what that one does, and run this again if it is still wanted"
    )


def beyond_retention(days: Sequence[str], retain_days: int | None) -> list[str]:
    """Those of the published `days` that lie `retain_days` or more before the newest."""
    if retain_days is None or not days:
        return []
    first = (date.fromisoformat(max(days)) - timedelta(days=retain_days - 1)).isoformat()
    return sorted(d for d in days if d < first)


def table_name(spec: Spec) -> str:
    """The table of a pipeline's scores."""
    assert spec.publish is not None, "asked for pipelines that publish"
    return spec.publish.table or f"{spec.pipeline}_scores"
