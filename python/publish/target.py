"""The contract of a warehouse: stage, audit, swap, the current view, retention, grants, erasure.

A day is published by these calls, in this order:

    with open_target(spec, ws, lock) as target:
        target.create(df.dtypes)
        if target.missing(ds, key) is not None:
            with target.stage(df, ds, key) as staged:
                checks = day_checks(staged, limits, spec.publish.audit)
                if all(check.ok for check in checks):
                    target.swap(staged, source, checks)
                else:
                    target.keep(staged)
        target.grant(spec.publish.grants)
        target.drop_days(beyond_retention(target.days(), spec.publish.retain_days))

What every warehouse promises:

- **One step.** Readers see a day as it was before `swap` or as it is after it, whenever the process dies. Where a
  warehouse has no transactions, `published` is the last thing that `swap` changes.
- **Reruns heal.** `stage` removes what a killed run left of the same day. `swap` of a day that is published replaces
  its rows. `create`, `grant` and `drop_days` may be called again.
- **One writer.** `create` and whatever changes the table write the token of the run's lease (`RunLock.fence`) and
  refuse a run that a later holder has overtaken: `lease_lost`. The `lock` is None where nothing is changed.
- **Errors.** Faults of the client library become UserErrors (`headrace.publish.opening.failures`), with one line that
  says what the table holds now. Values go into SQL as parameters and names as quoted identifiers.

A package adds a warehouse by a `headrace.config.warehouse.WarehouseKind`, whose `opens` names a function
`(Spec, Workspace, RunLock | None) -> context manager of a Target`; examples/own_package has all of it. `SqlTarget`
(`publish/sql`) has the methods for databases in SQL, `FilesTarget` (`publish/files`) for those that load Parquet files.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

from headrace.config import Spec
from headrace.config.schema import column
from headrace.errors import UserError
from headrace.storage import LeaseLost

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


log = logging.getLogger("headrace.publish")

#: Number of refused keys that messages name.
_NAMED = 5
#: Longest key that a manifest holds, in characters; of a longer one it has the length alone.
_MOST_CHARACTERS = 8_192
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
    """A day's scores in staging: readers do not see them, the queries of an audit do.

    The SQL of an audit is what all warehouses understand: it names columns by `quote`, the day by `day`, and aliases
    each derived table.
    """

    ds: str
    #: The key of the run that staged it.
    key: str
    #: Rows that were written to staging.
    rows: int
    #: The newest published day before this one, None where there is none.
    previous: PublishedDay | None

    @property
    def label(self) -> str:
        """Return where it is, for people."""
        ...

    @property
    def relation(self) -> str:
        """Return the staged rows as `FROM` takes them: a quoted table, or a query with an alias."""
        ...

    @property
    def day(self) -> str:
        """Return `ds` as a literal of the type that the warehouse's column `ds` has."""
        ...

    def quote(self, name: str) -> str:
        """Return a column's name as an identifier of the warehouse's SQL."""
        ...

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of one SELECT statement, which may read `relation` and `previous.relation`."""
        ...


class Target(Protocol):
    """An open warehouse, for the scores table of one pipeline. A reader sees a day as it was, or as it is published.

    What changes it raises LeaseLost, and changes nothing, where a later holder of the pipeline's lease has been at work
    there: docs/consistency.md says how far each warehouse can hold to that.
    """

    #: The table as people write it, such as `schema.table` or a path.
    label: str
    #: The kind of the output in manifests: the value of `publish.warehouse.kind`.
    kind: str
    #: The server and the account on it, for people; `embedded` for our own.
    address: str

    def claim(self) -> None:
        """Have changes of earlier runs that stand still refused from now on, as far as the warehouse can.

        Raises:
            LeaseLost: a later holder of the lease has been here.
        """
        return

    def key_limits(self, column: str) -> KeyLimits:
        """Return what the table holds of a key's text. `column`: that of the user key, or of the item key."""
        return KeyLimits()

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        """Make the table and its current view where there are none; add columns that the scores have gained.

        The columns and their order are those of `headrace.publish.target.published_columns`. The view TABLE_current
        has the rows of the newest published day.

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

        Raises:
            LeaseLost: a later holder of the lease has been here; nothing is changed.
            UserError: the warehouse failed; the day is as it was.
        """
        ...

    def keep(self, staged: StagedDay) -> None:
        """Leave the staged rows when the block of `stage` ends, until the day is staged again or `drop_kept`."""
        ...

    def kept_labels(self, days: Sequence[str] | None = None) -> list[str]:
        """Return the labels of what `keep` left, of all runs (of these days alone)."""
        ...

    def drop_kept(self, days: Sequence[str] | None = None) -> list[str]:
        """Drop what `keep` left (of these days alone). Return the labels."""
        ...

    def published(self, ds: str) -> Publication | None:
        """Return the record of a day; None where it has not been published, or where there is no table."""
        ...

    def days(self) -> list[str]:
        """Return the days that have been published and not dropped, oldest first; empty where there is no table."""
        ...

    def count(self, ds: str) -> int:
        """Return the number of the day's rows in the table; 0 for a day that is not published."""
        ...

    def missing(self, ds: str, key: str) -> str | None:
        """Return why the day's rows are not those of the run `key`, or None."""
        publication = self.published(ds)
        if publication is None:
            return f"{self.label} has no publication for {ds}"
        if publication.key != key:
            return f"{self.label} holds another run's rows for {ds}"
        rows = self.count(ds)
        if rows != publication.rows:
            return f"{self.label} has {rows:,} rows for {ds}, and {publication.rows:,} were published"
        return None

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        """Return the first rows of a day, by user and rank: column -> value.

        Raises:
            UserError: there is no table.
        """
        ...

    def drop_days(self, days: Sequence[str]) -> None:
        """Drop days and their records: readers lose a day whole, then its space is freed. Unknown days are no error."""
        ...

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        """Count the published rows with one of these keys in a column, by day; days without any are left out."""
        ...

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        """Count files beside the published days that have such rows, or such values in statistics; 0 in a database.

        They are of days that were dropped or published again, and of processes that were killed.
        """
        return 0

    @property
    def not_reached(self) -> str:
        """Return what of a foreign server may still have erased rows, for the proof; empty: nothing."""
        return ""

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        """Remove these rows of all days, and the leftovers; days stay published, by the same runs, with fewer rows.

        Args:
            column: the user's key or the item's.
            keys: the values of the rows to remove.

        Returns:
            what is left to be done by hand; empty: nothing.

        Raises:
            LeaseLost: a later holder of the lease has been here.
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
    """Return the error for a run that a later holder of its lease has overtaken at a table."""
    return LeaseLost(
        f"{label}: a later run of the pipeline has been at work there since this one began; nothing of this one was "
        f"published. See what that one does, and run this again if it is still wanted"
    )


def beyond_retention(days: Sequence[str], retain_days: int | None) -> list[str]:
    """Return those of the published `days` that lie `retain_days` or more before the newest."""
    if retain_days is None or not days:
        return []
    first = (date.fromisoformat(max(days)) - timedelta(days=retain_days - 1)).isoformat()
    return sorted(d for d in days if d < first)


def table_name(spec: Spec) -> str:
    """Return the name of the table of a pipeline's scores."""
    assert spec.publish is not None, "asked for pipelines that publish"
    return spec.publish.table or f"{spec.pipeline}_scores"


#: How many columns each scores table has; those after them are further ones of the scores, and may be null.
SCORES = 6


def published_columns(
    user: str, item: str, spark_types: Sequence[tuple[str, str]], taken: Container[str]
) -> list[tuple[str, str]]:
    """(column, Spark's `simpleString`) of the table: ds, user, item, rank, score, model_version, then the rest.

    Args:
        user: name of the user key.
        item: name of the item key.
        spark_types: of the lake's scores.
        taken: the types that the warehouse takes.

    Raises:
        UserError: a column is missing or has a type that the warehouse does not take.
    """
    types = dict(spark_types)
    first = ("ds", user, item, "rank", "score", "model_version")
    columns = []
    for name in (*first, *(extra for extra in types if extra not in first)):
        type_ = types.get(name)
        if type_ is None:
            raise UserError(
                f"the scores to publish have no column '{name}' (they have {', '.join(types)}): run stage 'score' again"
            )
        if type_ not in taken:
            known = f"; it takes {', '.join(taken)}" if isinstance(taken, Iterable) else ""
            raise UserError(f"the scores' column '{name}' has type {type_}, which the warehouse does not take{known}")
        columns.append((name, type_))
    return columns


@dataclass(frozen=True)
class KeyLimits:
    """Limits of a target for a key that is text; None: any length."""

    #: UTF-8 bytes at most.
    max_bytes: int | None = None
    #: Characters at most.
    max_characters: int | None = None
    #: Whether it takes a NUL character (U+0000).
    nul: bool = True
    #: Whether it takes the empty text.
    empty: bool = True

    def reason(self, key: Column) -> Column:
        """Return why a key cannot be held, as text; null where it can."""
        from pyspark.sql import functions as F

        reason = F.when(F.lit(False), F.lit(""))
        if not self.nul:
            reason = reason.when(key.contains("\0"), F.lit("it has a NUL character"))
        if not self.empty:
            reason = reason.when(key == "", F.lit("it is empty"))
        for most, length, unit in (
            (self.max_bytes, F.octet_length(key), "bytes"),
            (self.max_characters, F.length(key), "characters"),
        ):
            if most is not None:
                reason = reason.when(length > most, F.concat(length, F.lit(f" {unit}, at most {most:,} are taken")))
        return reason


@dataclass(frozen=True)
class LeftOut:
    """Rows that are not in a target, and some of the keys that it cannot hold."""

    rows: int = 0
    #: `{column: key, "reason": text}`; of a key that is too long to be named the key is None.
    keys: Sequence[dict[str, Any]] = field(default=())

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.rows + other.rows, [*self.keys, *(k for k in other.keys if k not in self.keys)])

    def warn(self, label: str) -> None:
        """Log what is left out of a target, if anything is."""
        if self.rows:
            log.warning("%s: %s rows are left out: %s", label, f"{self.rows:,}", "; ".join(map(described, self.keys)))


def described(key: dict[str, Any]) -> str:
    """Return a key of `LeftOut` for people: at most 40 characters of it, control characters escaped."""
    column = next(name for name in key if name != "reason")
    value = key[column]
    shortened = "a key" if value is None else repr(value if len(value) <= 40 else value[:40] + "…")
    return f"{column} {shortened}: {key['reason']}"


def without_unfit_keys(df: DataFrame, limits: dict[str, KeyLimits], user: str) -> tuple[DataFrame, LeftOut]:
    """Leave out the rows whose keys a target cannot hold; ranks of a list begin at 1 and have no gaps as before.

    Args:
        df: the day's scores.
        limits: by key column. Columns that are no text are passed over.
        user: name of the user key.

    Returns:
        the rows that the target holds, and what is left out.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    texts = {name for name, type_ in df.dtypes if type_ == "string"}
    names = [name for name, key_limits in limits.items() if name in texts and key_limits != KeyLimits()]
    if not names:
        return df, LeftOut()
    keys = [column(name) for name in names]
    reasons = [limits[name].reason(key) for name, key in zip(names, keys, strict=True)]
    unfit = reduce(lambda a, b: a | b, (reason.isNotNull() for reason in reasons))
    rows = df.where(unfit).count()
    if not rows:
        return df, LeftOut()
    named: list[dict[str, Any]] = []
    for name, key, reason in zip(names, keys, reasons, strict=True):
        named_key = F.when(F.length(key) <= _MOST_CHARACTERS, key)
        unfit_keys = df.select(named_key.alias("key"), reason.alias("reason")).where("reason IS NOT NULL").distinct()
        named += [
            {name: row["key"], "reason": row["reason"]} for row in unfit_keys.orderBy("reason", "key").take(_NAMED)
        ]
    fitting = df.where(~unfit)
    order = Window.partitionBy(column(user)).orderBy("rank")
    rank = F.row_number().over(order).cast(df.schema["rank"].dataType)
    return fitting.withColumn("rank", rank).select(*map(column, df.columns)), LeftOut(rows, named[:_NAMED])
