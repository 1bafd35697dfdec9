"""The table of events at the version that ingest's manifest pins, and the days of it that a dataset is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import TableSource
from headrace.errors import UserError
from headrace.features.build.window import first_day
from headrace.features.functions.spark_expressions import col
from headrace.features.types import declared
from headrace.lake.delta.with_spark import read_version
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.tables.declared import PinnedTable
from headrace.manifest import Output
from headrace.schema import TableColumn, is_wider
from headrace.stage import Context


def pinned_table(ctx: Context, source: str | None = None) -> Output:
    """The pinned table of events: the main source's, or a named one's.

    Raises:
        UserError: the manifest names none.
    """
    given = ctx.spec.source if source is None else ctx.spec.sources[source].source
    name = ctx.ws.name_of(ctx.ws.events(ctx.spec.pipeline, source))
    if isinstance(given, TableSource):
        facts = _facts(ctx, source)
        if "table" not in facts:
            raise UserError(f"ingest's manifest of {ctx.ds} is of landing files; run ingest again")
        name = facts["table"]["name"]
    for output in ctx.upstream["ingest"].outputs:
        if output.name == name:
            return output
    raise UserError(f"ingest's manifest of {ctx.ds} names no table {name}; run ingest again")


def _facts(ctx: Context, source: str | None) -> Mapping[str, Any]:
    """What ingest's manifest says of a source."""
    facts = ctx.upstream["ingest"].facts
    return facts if source is None else facts["sources"][source]


def source_table(ctx: Context, source: str | None = None) -> PinnedTable | None:
    """A source that is a table, as ingest has pinned it; None where the source is landing files.

    Raises:
        UserError: the version is gone, or files are others than they were.
    """
    spec = ctx.spec
    given, table = (spec.source, spec.table)
    if source is not None:
        given, table = spec.sources[source].source, spec.sources[source].table
    if not isinstance(given, TableSource):
        return None
    facts = _facts(ctx, source)
    bad_rows = ctx.ws.quarantine(spec.pipeline, source)
    name = ctx.ws.name_of(bad_rows)
    at = next(o.version for o in ctx.upstream["ingest"].outputs if o.name == name)
    listed = ForgottenValues.load(ctx.ws.forgotten_values(spec.pipeline))
    forgotten = None if listed is None else listed.of([c.name for c in table.columns])
    version = pinned_table(ctx, source).version
    return PinnedTable.of(given, table, ctx.ds, facts, version, (bad_rows, int(at)), forgotten)


def days_of_window(ctx: Context, days: Collection[str]) -> list[str]:
    """Of days that were taken, those that the dataset of `ctx.ds` may see: see `events_of_window`."""
    spec = ctx.spec
    if not spec.source.daily:
        return sorted(days)
    first = ""
    if spec.features.split.by == "time":
        first = spec.first_landing_day(first_day(spec, ctx.ds))
    return sorted(d for d in days if first <= d <= ctx.ds)


def read_events(ctx: Context, spark: SparkSession, source: str | None = None) -> DataFrame:
    """The rows of the pinned version of a source, columns in the types that features see them in.

    Of a named source all of them, up to ds where it is a table; of the main source at least those that
    `events_of_window` leaves, and those alone where it is a table.
    """
    table = ctx.spec.table if source is None else ctx.spec.sources[source].table
    taken = source_table(ctx, source)
    if taken is not None:
        days = days_of_window(ctx, taken.days) if source is None else [d for d in taken.days if d <= ctx.ds]
        return as_features_see(taken.rows(spark, days), table.columns)
    pinned = pinned_table(ctx, source)

    def wanted(partition: Mapping[str, str | None]) -> bool:
        ds = partition.get("ds")
        return ds is not None and (source is not None or not ctx.spec.source.daily or bool(days_of_window(ctx, [ds])))

    return as_features_see(read_version(spark, ctx.ws.locate(pinned.name), int(pinned.version), wanted), table.columns)


def as_features_see(events: DataFrame, columns: Sequence[TableColumn]) -> DataFrame:
    """Return events with declared columns as features see them (headrace.features.types).

    Small integers become int, local times those of UTC, and what the pinned version has with a narrower type than the
    declaration gets the declared one. A column of any other type, of an older declaration, stays for others to refuse.
    """
    stored = dict(events.dtypes)
    casts = {}
    for column in columns:
        type_, seen_as = stored.get(column.name), str(declared(column))
        if (
            type_ is not None
            and type_ != seen_as
            and (type_ == column.stored_type or is_wider(column.stored_type, type_))
        ):
            casts[column.name] = col(column.name).cast(seen_as)
    return events.withColumns(casts)


def events_of_window(ctx: Context, events: DataFrame) -> DataFrame:
    """The rows that the dataset of `ctx.ds` may see.

    Of a daily source those that landed up to ds, with a split by time from `first_day` on; else the newest snapshot up
    to ds.
    """
    spec = ctx.spec
    if isinstance(spec.source, TableSource):
        return events
    if not spec.source.daily:
        # Each run's day of a snapshot source holds all of it.
        newest = events.where(F.col("ds") <= ctx.ds).agg(F.max("ds")).collect()[0][0]
        return events.where(F.col("ds") == F.lit(newest))
    events = events.where(F.col("ds") <= ctx.ds)
    if spec.features.split.by == "time":
        events = events.where(F.col("ds") >= spec.first_landing_day(first_day(spec, ctx.ds)))
    return events
