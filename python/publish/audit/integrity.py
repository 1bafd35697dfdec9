"""What must always hold for staged scores: rows, keys, ranks, scores."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.publish.audit.counts import DayCounts, Expected
from headrace.publish.target import Check, StagedDay


@dataclass(frozen=True)
class Limits(Expected):
    """What to hold the day's scores against."""

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
        """A check that there are none; of a query of offenders, `words` stand before each column, to name them."""
        if not count:
            return Check(name, 0, "0", True)
        shown = [
            " ".join(f"{word} {value}".strip() for word, value in zip(words, row, strict=True) if value is not None)
            for row in staged.query(f"{offenders} LIMIT 3")
        ]
        return Check(name, count, "0", False, "for example " + ", ".join(shown))

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
