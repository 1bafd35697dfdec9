"""What must always hold for staged scores: rows, keys, ranks, scores; asked of the warehouse in SQL."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.publish.target import Check, StagedDay


@dataclass(frozen=True)
class Limits:
    """What to hold the day's scores against."""

    #: Names of the keys' columns.
    user: str
    item: str
    #: Columns that must not be null.
    required: tuple[str, ...]
    #: Rows that the scores' manifest states.
    expected_rows: int
    min_rows: int
    top_k: int
    #: Largest relative difference from the last published day's rows; None: not checked.
    max_row_change: float | None
    #: Whether lists are in the order of their scores: not where `score.rerank` makes them.
    by_score: bool = True


def integrity_checks(staged: StagedDay, limits: Limits) -> list[Check]:
    """All checks on a staged day, failed ones included."""
    q, source = staged.quote, staged.relation
    user, item, rank, score = q(limits.user), q(limits.item), q("rank"), q("score")
    nulls = " OR ".join(f"{q(name)} IS NULL" for name in limits.required)

    def none_of(name: str, *words: str, offenders: str) -> Check:
        """A check that a query of offenders is empty; `words` stand before each of its columns, to name them."""
        count = int(staged.query(f"SELECT count(*) FROM ({offenders}) AS found")[0][0])
        if not count:
            return Check(name, 0, "0", True)
        shown = [
            " ".join(f"{word} {value}".strip() for word, value in zip(words, row, strict=True) if value is not None)
            for row in staged.query(f"{offenders} LIMIT 3")
        ]
        return Check(name, count, "0", False, "for example " + ", ".join(shown))

    rows = int(staged.query(f"SELECT count(*) FROM {source}")[0][0])
    checks = [
        Check("rows as the scores' manifest states", rows, str(limits.expected_rows), rows == limits.expected_rows),
        Check("rows", rows, f"at least {limits.min_rows}", rows >= limits.min_rows),
        none_of("rows with a null", "user", "rank", offenders=f"SELECT {user}, {rank} FROM {source} WHERE {nulls}"),
        none_of("rows of another day", "", offenders=f"SELECT {q('ds')} FROM {source} WHERE {q('ds')} <> {staged.day}"),
        none_of(
            "keys (user, rank) given twice",
            "user",
            "rank",
            offenders=f"SELECT {user}, {rank} FROM {source} GROUP BY {user}, {rank} HAVING count(*) > 1",
        ),
        none_of(
            "items given twice to a user",
            "user",
            "item",
            offenders=f"SELECT {user}, {item} FROM {source} GROUP BY {user}, {item} HAVING count(*) > 1",
        ),
        none_of(
            "users whose ranks are not 1, 2, ...",
            "user",
            offenders=f"SELECT {user} FROM {source} GROUP BY {user} "
            f"HAVING min({rank}) <> 1 OR max({rank}) <> count(DISTINCT {rank})",
        ),
        none_of(
            f"users with more than {limits.top_k} items",
            "user",
            offenders=f"SELECT {user} FROM {source} GROUP BY {user} HAVING count(*) > {int(limits.top_k)}",
        ),
        # NaN is above all numbers, or fails both comparisons: it is outside too.
        none_of(
            "scores outside [0, 1]",
            "",
            offenders=f"SELECT {score} FROM {source} WHERE NOT ({score} >= 0 AND {score} <= 1)",
        ),
    ]
    if limits.by_score:
        checks.append(
            none_of(
                "scores above that of a better rank",
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
