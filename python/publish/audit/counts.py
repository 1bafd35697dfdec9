"""What an audit counts in the staged rows: one statement by users, and one by items where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headrace.publish.target import StagedDay


@dataclass(frozen=True)
class Expected:
    """What the columns of a day's rows are called, and what is expected of each row and list."""

    #: Names of the keys' columns.
    user: str
    item: str
    #: Columns that must not be null.
    required: tuple[str, ...]
    top_k: int


@dataclass(frozen=True)
class DayCounts:
    """Of the staged rows, in a single pass over them."""

    rows: int
    #: With a list; null is none.
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
    nulls = _one(" OR ".join(f"{q(name)} IS NULL" for name in expected.required))
    other_day = _one(f"{q('ds')} <> {staged.day}")
    by_rank = f"OVER (PARTITION BY {user} ORDER BY {rank})"
    by_item = f"OVER (PARTITION BY {user} ORDER BY {item})"
    # row_number() - rank() tells equal ones apart: 0 is the first of them, 1 the second.
    rows = (
        f"SELECT {user} AS of_user, {rank} AS place, {score} AS given, {nulls} AS is_null, "
        f"{other_day} AS other_day, lag({score}) {by_rank} AS better, "
        f"row_number() {by_rank} - rank() {by_rank} AS same_rank, "
        f"row_number() {by_item} - rank() {by_item} AS same_item FROM {staged.relation}"
    )
    of_rows = [
        "d.is_null",
        "d.other_day",
        # NaN is above all numbers, or fails both comparisons: it is outside too.
        _one("NOT (d.given >= 0 AND d.given <= 1)"),
        _one("d.same_rank = 1"),
        _one("d.same_item = 1"),
        _one("d.given > d.better"),
        *(_one(f"d.given < {edge!r}") for edge in edges),
    ]
    ranks = f"sum({_one('d.same_rank = 0 AND d.place IS NOT NULL')})"
    of_users = [
        _one(f"min(d.place) <> 1 OR max(d.place) <> {ranks}"),
        _one(f"count(*) > {int(expected.top_k)}"),
        "count(*)",
        *(f"sum({flag})" for flag in of_rows),
    ]
    users = (
        f"SELECT d.of_user, {', '.join(f'{count} AS n{i}' for i, count in enumerate(of_users))} "
        f"FROM ({rows}) AS d GROUP BY d.of_user"
    )
    sums = ", ".join(f"sum(g.n{i})" for i in range(len(of_users)))
    ((n_users, *counted),) = staged.query(f"SELECT count(g.of_user), {sums} FROM ({users}) AS g")
    broken, long, n, null, other, outside, repeated, items, above, *below = (int(x or 0) for x in counted)
    cuts = [0, *below, n]
    return DayCounts(
        rows=n,
        users=int(n_users),
        nulls=null,
        other_days=other,
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
    """Of the items of the staged day and of the one before."""

    #: Rows of the day before, and of the staged day: of each item that was most frequent before, then of all others.
    by_item: tuple[list[int], list[int]]
    #: Distinct items of the staged day.
    given: int
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
    found: list[tuple[Any, ...]] = staged.query(
        f"SELECT t.frequent, sum(t.past), sum(t.now), sum({_one('t.now > 0 AND t.item IS NOT NULL')}), "
        f"sum(CASE WHEN t.past = 0 THEN t.now ELSE 0 END) FROM ({places}) AS t GROUP BY t.frequent ORDER BY t.frequent"
    )
    # Place 0, all others, comes last, and is a bin without rows, too.
    ordered_bins = [row for row in found if row[0]] + ([row for row in found if not row[0]] or [(0, 0, 0, 0, 0)])
    past, now = ([int(row[i]) for row in ordered_bins] for i in (1, 2))
    return ItemCounts((past, now), sum(int(row[3]) for row in found), sum(int(row[4]) for row in found))


def _one(condition: str) -> str:
    """1 where it is true, else 0."""
    return f"CASE WHEN {condition} THEN 1 ELSE 0 END"
