"""How the rows of a day differ from those that were there when it was taken before."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Table, TableSource
from headrace.errors import UserError
from headrace.lake.ingest.rules import event_time
from headrace.lake.landing import midnight
from headrace.lake.sources.frame import quoted
from headrace.lake.sources.values import extract
from headrace.lake.tables.change_feed import AFTER, DELETE, INSERT, TYPE

_KINDS = ("late", "updated", "deleted")


def count_changes(before: DataFrame, now: DataFrame, table: Table) -> dict[str, dict[str, int]]:
    """Rows that came, changed and went, by day.

    With `table.keys` a row is its keys; without, its values, so that a change is one row less and one more.

    Args:
        before: of headrace.lake.tables.declared.table_rows, at the older version.
        now: the same at the newer one.
        table: the declaration.

    Returns:
        by day: late, updated, deleted.
    """
    content = F.xxhash64(*quoted([c.name for c in table.columns])).alias("content")
    row = F.struct(*quoted(table.keys)).alias("row") if table.keys else content.alias("row")
    sides = [f.select("ds", row, content, F.lit(i).alias("side")) for i, f in enumerate((before, now))]
    old, new = F.col("side") == 0, F.col("side") == 1
    wide = F.col("content").cast("decimal(20,0)")
    each = (
        sides[0]
        .unionByName(sides[1])
        .groupBy("ds", "row")
        .agg(
            F.count_if(old).alias("old"),
            F.count_if(new).alias("new"),
            F.sum(F.when(old, wide)).alias("then"),
            F.sum(F.when(new, wide)).alias("now"),
        )
    )
    updated = (F.col("old") == F.col("new")) & (F.col("then") != F.col("now"))
    counted = each.groupBy("ds").agg(
        F.sum(F.greatest(F.col("new") - F.col("old"), F.lit(0))).alias("late"),
        F.sum(F.when(updated, F.col("new")).otherwise(0)).alias("updated"),
        F.sum(F.greatest(F.col("old") - F.col("new"), F.lit(0))).alias("deleted"),
    )
    return {r["ds"]: {kind: int(r[kind]) for kind in _KINDS} for r in counted.collect()}


def count_feed(feed: DataFrame, ds: str, source: TableSource, table: Table) -> dict[str, int]:
    """What the change data feed has of a day besides new events.

    Args:
        feed: of headrace.lake.tables.change_feed.ChangeFeed.changes.
        ds: the day.
        source: the spec's.
        table: the declaration.

    Returns:
        late: rows inserted whose event was before the day; updated, deleted.
    """
    late = F.lit(False)
    if table.event_time:
        declared = next(c for c in table.columns if c.name == table.event_time)
        found = extract(declared, feed.schema, source)
        if found is not None:
            feed = feed.select(TYPE, found.value.alias(table.event_time))
            start = F.lit(round(midnight(source, ds).timestamp() * 1e6))
            late = F.unix_micros(event_time(table.event_time, source)) < start
    kind = F.col(TYPE)
    counted = feed.agg(
        F.count_if((kind == INSERT) & late).alias("late"),
        F.count_if(kind == AFTER).alias("updated"),
        F.count_if(kind == DELETE).alias("deleted"),
    ).collect()[0]
    return {name: int(counted[name]) for name in _KINDS}


def net_change(before: int, now: int) -> dict[str, int]:
    """The least that must have happened, where the older version cannot be read any more."""
    return {"late": max(0, now - before), "updated": 0, "deleted": max(0, before - now)}


def refuse_changes(changes: Mapping[str, Mapping[str, int]], source: TableSource, where: str) -> None:
    """Stop where a day has changed in a way that the spec refuses.

    Args:
        changes: by day, of `count_changes`.
        source: the spec's.
        where: before `source` in a key of the spec.

    Raises:
        UserError: with the counts.
    """
    policy = source.changed_days
    refused = {"late": policy.late, "updated": policy.updates, "deleted": policy.deletes}
    found = [
        f"{ds}: {n:,} {kind}"
        for ds, counts in sorted(changes.items())
        for kind, n in counts.items()
        if n and refused[kind] == "refuse"
    ]
    if found:
        raise UserError(
            f"rows of {source.shown} have changed since their days were taken: {'; '.join(found)}. Nothing was taken "
            f"anew; {where}source.changed_days says what is accepted (late, updates, deletes)"
        )
