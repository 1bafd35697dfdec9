"""The audit of a staged day by the warehouse that has it: counts, what must always hold, and drift from the day before.

The warehouse reads the day's rows once by users, and once more by items where `publish.audit` asks for it. `Limits`
always hold; `publish.audit` asks for the comparisons with the newest published day.

A pipeline's own rules are references to other tables, and figures in Spark SQL or the warehouse's SQL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headrace.compute.psi import psi
from headrace.config.warehouse import Audit, AuditRule, Reference
from headrace.errors import UserError, nearest
from headrace.features.table_ops.sql import fault_without_spark
from headrace.publish.target import Check, StagedDay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def check_within(name: str, value: float | None, low: float | None, high: float | None, detail: str = "") -> Check:
    """Return the check that `low <= value <= high`; None and NaN are outside.

    Args:
        low: None: no such limit.
        high: likewise.
        detail: said about the figure.
    """
    limits = [f"at least {low:g}"] if low is not None else []
    limits += [f"at most {high:g}"] if high is not None else []
    limit = " and ".join(limits)
    if value is None or math.isnan(value):
        return Check(name, math.nan, limit, False, detail or "no number")
    ok = (low is None or value >= low) and (high is None or value <= high)
    return Check(name, _short(value, low, high), limit, ok, detail)


def _short(value: float, low: float | None, high: float | None) -> float:
    """Four decimals, unless that would hide on which side of a limit it is."""
    rounded = round(value, 4)
    return value if rounded in (low, high) and rounded != value else rounded


@dataclass(frozen=True)
class Expected:
    """Names of the columns of a day's rows, and expectations of each row and list."""

    #: Names of the keys' columns.
    user: str
    item: str
    #: Columns that must not be null.
    required: tuple[str, ...]
    top_k: int


@dataclass(frozen=True)
class DayCounts:
    """Counts of the staged rows, from a single pass over them."""

    rows: int
    #: Users with a list; null is no user.
    users: int
    #: Rows that lack a required column; that are of another day; whose score is outside [0, 1].
    nulls: int
    other_days: int
    outside: int
    #: Pairs (user, rank) and (user, item) of several rows.
    repeated_ranks: int
    repeated_items: int
    #: Rows whose score is above that of the rank before.
    above_better: int
    #: Users whose ranks are not 1, 2, ...; and those with more than `Expected.top_k` rows.
    broken_ranks: int
    too_long: int
    #: By score: rows below the first edge, from each edge to the next, from the last on.
    by_score: tuple[int, ...]


def count_day(staged: StagedDay, expected: Expected, edges: Sequence[float] = ()) -> DayCounts:
    """Count the staged rows, by one statement that reads them once.

    Args:
        staged: the day.
        expected: see there.
        edges: scores, ascending, for `DayCounts.by_score`.
    """
    q = staged.quote
    user, item, rank, score = q(expected.user), q(expected.item), q("rank"), q("score")
    nulls = _flag(" OR ".join(f"{q(name)} IS NULL" for name in expected.required))
    other_day = _flag(f"{q('ds')} <> {staged.day}")
    by_rank = f"OVER (PARTITION BY {user} ORDER BY {rank})"
    by_item = f"OVER (PARTITION BY {user} ORDER BY {item})"
    # row_number() - rank() numbers rows with equal keys: 0 is the first of them, 1 the second.
    rows = (
        f"SELECT {user} AS of_user, {rank} AS place, {score} AS given, {nulls} AS is_null, "
        f"{other_day} AS other_day, lag({score}) {by_rank} AS better, "
        f"row_number() {by_rank} - rank() {by_rank} AS same_rank, "
        f"row_number() {by_item} - rank() {by_item} AS same_item FROM {staged.relation}"
    )
    of_rows = [
        "d.is_null",
        "d.other_day",
        # NaN is above all numbers, or fails both comparisons: it counts as outside.
        _flag("NOT (d.given >= 0 AND d.given <= 1)"),
        _flag("d.same_rank = 1"),
        _flag("d.same_item = 1"),
        _flag("d.given > d.better"),
        *(_flag(f"d.given < {edge!r}") for edge in edges),
    ]
    ranks = f"sum({_flag('d.same_rank = 0 AND d.place IS NOT NULL')})"
    of_users = [
        _flag(f"min(d.place) <> 1 OR max(d.place) <> {ranks}"),
        _flag(f"count(*) > {int(expected.top_k)}"),
        "count(*)",
        *(f"sum({flag})" for flag in of_rows),
    ]
    users = (
        f"SELECT d.of_user, {', '.join(f'{count} AS n{i}' for i, count in enumerate(of_users))} "
        f"FROM ({rows}) AS d GROUP BY d.of_user"
    )
    sums = ", ".join(f"sum(g.n{i})" for i in range(len(of_users)))
    ((n_users, *counted),) = staged.query(f"SELECT count(g.of_user), {sums} FROM ({users}) AS g")
    broken, long, n, null, other_days, outside, repeated, items, above, *below = (int(x or 0) for x in counted)
    cuts = [0, *below, n]
    return DayCounts(
        rows=n,
        users=int(n_users),
        nulls=null,
        other_days=other_days,
        outside=outside,
        repeated_ranks=repeated,
        repeated_items=items,
        above_better=above,
        broken_ranks=broken,
        too_long=long,
        by_score=tuple(b - a for a, b in pairwise(cuts)),
    )


@dataclass(frozen=True)
class ItemCounts:
    """Counts of the items of the staged day and of the day before."""

    #: Rows of the day before, and of the staged day: of each item that was most frequent before, then of all others.
    by_item: tuple[list[int], list[int]]
    #: Distinct items of the staged day.
    distinct: int
    #: Rows of the staged day whose item the day before lacks.
    new_rows: int


def count_items(staged: StagedDay, item: str, top: int) -> ItemCounts:
    """Count rows by items, by one statement that reads each of both days once.

    Args:
        staged: the day.
        item: name of the items' column.
        top: how many of the most frequent items of the day before are told apart.
    """
    name = staged.quote(item)
    days = f"SELECT {name} AS item, 0 AS past, 1 AS now FROM {staged.relation}"
    if staged.previous is not None:
        days += f" UNION ALL SELECT {name} AS item, 1 AS past, 0 AS now FROM {staged.previous.relation}"
    items = f"SELECT d.item, sum(d.past) AS past, sum(d.now) AS now FROM ({days}) AS d GROUP BY d.item"
    ordered = f"SELECT c.*, row_number() OVER (ORDER BY c.past DESC, c.item) AS place FROM ({items}) AS c"
    frequent = f"CASE WHEN o.past > 0 AND o.place <= {int(top)} THEN o.place ELSE 0 END"
    places = f"SELECT o.*, {frequent} AS frequent FROM ({ordered}) AS o"
    bins: list[tuple[Any, ...]] = staged.query(
        f"SELECT t.frequent, sum(t.past), sum(t.now), sum({_flag('t.now > 0 AND t.item IS NOT NULL')}), "
        f"sum(CASE WHEN t.past = 0 THEN t.now ELSE 0 END) FROM ({places}) AS t GROUP BY t.frequent ORDER BY t.frequent"
    )
    # Place 0, all other items, is the last bin, even without rows.
    ordered_bins = [row for row in bins if row[0]] + ([row for row in bins if not row[0]] or [(0, 0, 0, 0, 0)])
    past, now = ([int(row[i]) for row in ordered_bins] for i in (1, 2))
    return ItemCounts((past, now), sum(int(row[3]) for row in bins), sum(int(row[4]) for row in bins))


def _flag(condition: str) -> str:
    """1 where it is true, else 0."""
    return f"CASE WHEN {condition} THEN 1 ELSE 0 END"


@dataclass(frozen=True)
class Limits(Expected):
    """Limits that always hold for a day's scores."""

    #: Rows that the scores' manifest states.
    expected_rows: int
    min_rows: int
    #: Largest relative difference from the last published day's rows; None: not checked.
    max_row_change: float | None
    #: Whether lists are in the order of their scores: not where `score.rerank` makes them.
    by_score: bool = True


def integrity_checks(staged: StagedDay, limits: Limits, counts: DayCounts) -> list[Check]:
    """All checks on a staged day, failed ones included; the warehouse is asked for examples of what failed.

    Args:
        staged: the day.
        limits: see there.
        counts: of the day, by these limits.
    """
    q, source = staged.quote, staged.relation
    user, item, rank, score = q(limits.user), q(limits.item), q("rank"), q("score")
    nulls = " OR ".join(f"{q(name)} IS NULL" for name in limits.required)

    def none_of(name: str, count: int, *words: str, offenders: str) -> Check:
        """Return a check that there are none; of a query of offenders, `words` precede each column, to name them."""
        if not count:
            return Check(name, 0, "0", True)
        examples = [
            " ".join(f"{word} {value}".strip() for word, value in zip(words, row, strict=True) if value is not None)
            for row in staged.query(f"{offenders} LIMIT 3")
        ]
        return Check(name, count, "0", False, "for example " + ", ".join(examples))

    rows = counts.rows
    checks = [
        Check("rows as the scores' manifest states", rows, str(limits.expected_rows), rows == limits.expected_rows),
        Check("rows", rows, f"at least {limits.min_rows}", rows >= limits.min_rows),
        none_of(
            "rows with a null",
            counts.nulls,
            "user",
            "rank",
            offenders=f"SELECT {user}, {rank} FROM {source} WHERE {nulls}",
        ),
        none_of(
            "rows of another day",
            counts.other_days,
            "",
            offenders=f"SELECT {q('ds')} FROM {source} WHERE {q('ds')} <> {staged.day}",
        ),
        none_of(
            "keys (user, rank) given twice",
            counts.repeated_ranks,
            "user",
            "rank",
            offenders=f"SELECT {user}, {rank} FROM {source} GROUP BY {user}, {rank} HAVING count(*) > 1",
        ),
        none_of(
            "items given twice to a user",
            counts.repeated_items,
            "user",
            "item",
            offenders=f"SELECT {user}, {item} FROM {source} GROUP BY {user}, {item} HAVING count(*) > 1",
        ),
        none_of(
            "users whose ranks are not 1, 2, ...",
            counts.broken_ranks,
            "user",
            offenders=f"SELECT {user} FROM {source} GROUP BY {user} "
            f"HAVING min({rank}) <> 1 OR max({rank}) <> count(DISTINCT {rank})",
        ),
        none_of(
            f"users with more than {limits.top_k} items",
            counts.too_long,
            "user",
            offenders=f"SELECT {user} FROM {source} GROUP BY {user} HAVING count(*) > {int(limits.top_k)}",
        ),
        none_of(
            "scores outside [0, 1]",
            counts.outside,
            "",
            offenders=f"SELECT {score} FROM {source} WHERE NOT ({score} >= 0 AND {score} <= 1)",
        ),
    ]
    if limits.by_score:
        checks.append(
            none_of(
                "scores above that of a better rank",
                counts.above_better,
                "user",
                "rank",
                offenders=f"SELECT {user}, {rank} FROM (SELECT {user}, {rank}, {score}, lag({score}) OVER "
                f"(PARTITION BY {user} ORDER BY {rank}) AS better FROM {source}) AS s WHERE {score} > better",
            )
        )
    if limits.max_row_change is not None:
        checks.append(_row_change(staged, rows, limits.max_row_change))
    return checks


def _row_change(staged: StagedDay, rows: int, limit: float) -> Check:
    last, name = staged.previous, "change of the number of rows"
    if last is None or not last.rows:
        return Check(name, 0.0, f"at most {limit:g}", True, "no earlier day")
    change = abs(rows - last.rows) / last.rows
    return Check(name, round(change, 4), f"at most {limit:g}", change <= limit, f"{last.rows:,} rows on {last.ds}")


#: Bins of the scores.
_TENTHS = 10


def score_edges(staged: StagedDay, audit: Audit) -> list[float]:
    """Return the scores between the tenths of the day before; none where `audit` does not compare scores."""
    previous = staged.previous
    if audit.max_score_psi is None or previous is None:
        return []
    score = staged.quote("score")
    tenths = staged.query(
        f"SELECT min(t.x) AS low FROM (SELECT {score} AS x, ntile({_TENTHS}) OVER (ORDER BY {score}) AS tenth "
        f"FROM {previous.relation}) AS t GROUP BY t.tenth ORDER BY low"
    )
    # Equal scores at a cut belong to the bin above it, on both days.
    edges = sorted({float(low) for (low,) in tenths})
    return edges[1:] or edges


def distribution_checks(
    staged: StagedDay,
    audit: Audit,
    item: str,
    counts: DayCounts,
    edges: Sequence[float],
    candidates: int | None,
    users: int | None,
) -> Iterator[Check]:
    """Yield the checks that `audit` asks for.

    Args:
        staged: the day.
        audit: see there.
        item: the items' column.
        counts: of the day.
        edges: of `score_edges`, by which they were counted.
        candidates: items that could be given; None: unknown, and coverage is not checked.
        users: users that were scored; None likewise.
    """
    previous = staged.previous
    compares_items = previous is not None and (audit.max_item_psi is not None or audit.max_new_items is not None)
    covers = audit.min_coverage is not None and bool(candidates)
    items = count_items(staged, item, audit.top_items) if compares_items or covers else ItemCounts(([], []), 0, 0)
    compares_scores = previous is not None and audit.max_score_psi is not None
    score_psi = psi(_previous_counts(staged, edges), counts.by_score) if compares_scores else None
    compared: list[tuple[str, float | None, float | None]] = [
        ("PSI of the scores", audit.max_score_psi, score_psi),
        ("PSI of the items", audit.max_item_psi, psi(*items.by_item)),
        ("share of rows with a new item", audit.max_new_items, items.new_rows / counts.rows if counts.rows else None),
    ]
    for name, limit, value in compared:
        if limit is not None and previous is None:
            yield Check(name, 0.0, "compared with an earlier day", True, "no earlier day")
        elif limit is not None and previous is not None:
            yield check_within(name, value, None, limit, f"against {previous.ds}")
    if audit.min_coverage is not None and candidates:
        yield _share(items.distinct, candidates, "share of the candidate items given", audit.min_coverage)
    if audit.min_users is not None and users:
        yield _share(counts.users, users, "share of the scored users with a list", audit.min_users)


def _previous_counts(staged: StagedDay, edges: Sequence[float]) -> list[int]:
    """Rows of the day before by bin: below the first edge, from each edge to the next, from the last on."""
    assert staged.previous is not None, "asked where there is one"
    score = staged.quote("score")
    whens = " ".join(f"WHEN {score} < {edge!r} THEN {i}" for i, edge in enumerate(edges))
    counts = staged.query(
        f"SELECT b.bin, count(*) FROM (SELECT CASE {whens} ELSE {len(edges)} END AS bin "
        f"FROM {staged.previous.relation}) AS b GROUP BY b.bin"
    )
    by_bin = {int(bin_): int(n) for bin_, n in counts}
    return [by_bin.get(i, 0) for i in range(len(edges) + 1)]


def _share(count: int, total: int, name: str, limit: float) -> Check:
    return check_within(name, count / total, limit, None, f"{count:,} of {total:,}")


def day_checks(
    staged: StagedDay, limits: Limits, audit: Audit | None, candidates: int | None = None, users: int | None = None
) -> list[Check]:
    """Return the checks that always hold, and those that `publish.audit` asks for against the day before.

    Args:
        staged: the day.
        limits: what must always hold.
        audit: None: nothing.
        candidates: items that could be given; None: unknown.
        users: users that were scored; None: unknown.
    """
    edges = [] if audit is None else score_edges(staged, audit)
    counts = count_day(staged, limits, edges)
    checks = integrity_checks(staged, limits, counts)
    if audit is not None:
        checks += distribution_checks(staged, audit, limits.item, counts, edges, candidates, users)
    return checks


def check_names(audit: Audit, columns: Sequence[str]) -> None:
    """Check what an audit names in the scores, without Spark and without rows.

    Args:
        audit: the section.
        columns: of the scores.

    Raises:
        UserError: a column that the scores do not have, or an expression that Spark must refuse.
    """
    for column in audit.references:
        _check_reference(column, columns)
    for name, rule in audit.rules.items():
        if rule.expr is not None and (fault := fault_without_spark(rule.expr, columns)) is not None:
            raise UserError(f"publish.audit.rules.{name}.expr: {fault}")
        if rule.sql is not None:
            _filled(rule.sql, {"staged": "staged", "previous": "previous"}, f"publish.audit.rules.{name}.sql")


def _check_reference(column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise UserError(
            f"publish.audit.references.{column}: the scores have no such column{nearest(column, columns)}; they have: "
            f"{', '.join(columns)}"
        )


_EXAMPLES = 3


def reference_checks(spark: SparkSession, df: DataFrame, references: Mapping[str, Reference]) -> Iterator[Check]:
    """For each column: that the table has its values.

    Raises:
        UserError: the scores or the table have no such column, or the table cannot be read.
    """
    from pyspark.sql import functions as F

    from headrace.features.functions.spark_expressions import col

    for column, reference in references.items():
        key_path = f"publish.audit.references.{column}"
        _check_reference(column, df.columns)
        table = _read(spark, reference.table, key_path)
        key = reference.column or column
        if key not in table.columns:
            raise UserError(
                f"{key_path}: {reference.table} has no column '{key}'{nearest(key, table.columns)}; it has: "
                f"{', '.join(table.columns)}"
            )
        values = df.select(col(column).alias("value")).where(F.col("value").isNotNull()).distinct()
        known = table.select(col(key).alias("known"))
        missing = values.join(known, values["value"].eqNullSafe(known["known"]), "left_anti")
        count = missing.count()
        detail = ""
        if count:
            examples = missing.orderBy("value").limit(_EXAMPLES).collect()
            detail = "for example " + ", ".join(str(row["value"]) for row in examples)
        yield Check(f"values of {column} that {reference.table} lacks", count, "0", not count, detail)


def _read(spark: SparkSession, table: str, key_path: str) -> DataFrame:
    from pyspark.errors import AnalysisException

    from headrace.storage import local

    try:
        if "/" not in table:
            return spark.read.table(table)
        kind = "delta" if (local(table) / "_delta_log").is_dir() else "parquet"
        return spark.read.format(kind).load(table)
    except AnalysisException as e:
        raise UserError(f"{key_path}: {table} cannot be read ({str(e).splitlines()[0]})") from None


def own_checks(df: DataFrame, staged: StagedDay, rules: Mapping[str, AuditRule]) -> Iterator[Check]:
    """Yield the figures of `publish.audit.rules` against their limits.

    Raises:
        UserError: a rule cannot be computed, or gives no number.
    """
    yield from _by_spark(df, {name: rule for name, rule in rules.items() if rule.expr is not None})
    for name, rule in rules.items():
        if rule.sql is not None:
            yield _by_warehouse(staged, name, rule)


def _by_spark(df: DataFrame, rules: Mapping[str, AuditRule]) -> Iterator[Check]:
    """All expressions in one pass."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    if not rules:
        return
    columns = []
    for name, rule in rules.items():
        assert rule.expr is not None
        try:
            column = F.expr(rule.expr)
            df.agg(column.cast("double"))
        except (AnalysisException, ParseException) as e:
            raise UserError(f"publish.audit.rules.{name}.expr: {str(e).strip().splitlines()[0]}") from None
        columns.append(column.cast("double").alias(name))
    figures = df.agg(*columns).collect()[0].asDict()
    for name, rule in rules.items():
        yield check_within(name, figures[name], rule.min, rule.max, rule.expr or "")


def _by_warehouse(staged: StagedDay, name: str, rule: AuditRule) -> Check:
    key_path = f"publish.audit.rules.{name}.sql"
    assert rule.sql is not None
    places: dict[str, str] = {"staged": staged.relation}
    if staged.previous is not None:
        places["previous"] = staged.previous.relation
    if (sql := _filled(rule.sql, places, key_path)) is None:
        return Check(name, 0.0, "compared with an earlier day", True, "no earlier day")
    rows = staged.query(sql)
    if len(rows) != 1 or len(rows[0]) != 1:
        raise UserError(f"{key_path}: gives {len(rows)} rows of {len(rows[0]) if rows else 0} columns, not one number")
    return check_within(name, _number(rows[0][0], key_path), rule.min, rule.max)


def _filled(sql: str, places: Mapping[str, str], key_path: str) -> str | None:
    """Return a rule's SQL with the relations in it; None where it names an earlier day, and `places` has none."""
    try:
        return sql.format(**places)
    except KeyError as e:
        if e.args == ("previous",):
            return None
        raise UserError(f"{key_path}: {{{e.args[0]}}} is none of {{staged}}, {{previous}}") from None
    except (ValueError, IndexError) as e:
        raise UserError(f"{key_path}: {e}; double a brace that is meant as such") from None


def _number(value: Any, key_path: str) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise UserError(f"{key_path}: gives {value!r}, not a number") from None
