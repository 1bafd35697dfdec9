"""The staged day beside the newest published one: scores, items, users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.config.publish import Audit
from headrace.psi import psi
from headrace.publish.audit.counts import DayCounts, ItemCounts, count_items
from headrace.publish.audit.limits import within
from headrace.publish.target import Check, StagedDay

#: Bins of the scores.
_TENTHS = 10


def score_edges(staged: StagedDay, asked: Audit) -> list[float]:
    """The scores that part the tenths of the day before; none where `asked` does not compare scores."""
    before = staged.previous
    if asked.max_score_psi is None or before is None:
        return []
    score = staged.quote("score")
    tenths = staged.query(
        f"SELECT min(t.x) AS low FROM (SELECT {score} AS x, ntile({_TENTHS}) OVER (ORDER BY {score}) AS tenth "
        f"FROM {before.relation}) AS t GROUP BY t.tenth ORDER BY low"
    )
    # Equal scores at a cut belong to the bin above it, on both days.
    edges = sorted({float(low) for (low,) in tenths})
    return edges[1:] or edges


def distribution_checks(
    staged: StagedDay,
    asked: Audit,
    item: str,
    counts: DayCounts,
    edges: Sequence[float],
    candidates: int | None,
    users: int | None,
) -> Iterator[Check]:
    """The checks that `asked` is for.

    Args:
        staged: the day.
        asked: see there.
        item: the items' column.
        counts: of the day.
        edges: of `score_edges`, by which they were counted.
        candidates: items that could be given; None: unknown, and coverage is not checked.
        users: users that were scored; None likewise.
    """
    before = staged.previous
    compares_items = before is not None and (asked.max_item_psi is not None or asked.max_new_items is not None)
    covers = asked.min_coverage is not None and bool(candidates)
    items = count_items(staged, item, asked.top_items) if compares_items or covers else ItemCounts(([], []), 0, 0)
    compares_scores = before is not None and asked.max_score_psi is not None
    score_psi = psi(_previous_counts(staged, edges), counts.by_score) if compares_scores else None
    compared: list[tuple[str, float | None, float | None]] = [
        ("PSI of the scores", asked.max_score_psi, score_psi),
        ("PSI of the items", asked.max_item_psi, psi(*items.by_item)),
        ("share of rows with a new item", asked.max_new_items, items.new_rows / counts.rows if counts.rows else None),
    ]
    for name, limit, value in compared:
        if limit is not None and before is None:
            yield Check(name, 0.0, "compared with an earlier day", True, "no earlier day")
        elif limit is not None and before is not None:
            yield within(name, value, None, limit, f"against {before.ds}")
    if asked.min_coverage is not None and candidates:
        yield _share(items.given, candidates, "share of the candidate items given", asked.min_coverage)
    if asked.min_users is not None and users:
        yield _share(counts.users, users, "share of the scored users with a list", asked.min_users)


def _previous_counts(staged: StagedDay, edges: Sequence[float]) -> list[int]:
    """Rows of the day before by bin: below the first edge, from each edge to the next, from the last on."""
    assert staged.previous is not None, "asked where there is one"
    score = staged.quote("score")
    whens = " ".join(f"WHEN {score} < {edge!r} THEN {i}" for i, edge in enumerate(edges))
    found = staged.query(
        f"SELECT b.bin, count(*) FROM (SELECT CASE {whens} ELSE {len(edges)} END AS bin "
        f"FROM {staged.previous.relation}) AS b GROUP BY b.bin"
    )
    by_bin = {int(bin_): int(n) for bin_, n in found}
    return [by_bin.get(i, 0) for i in range(len(edges) + 1)]


def _share(found: int, of: int, name: str, limit: float) -> Check:
    return within(name, found / of, limit, None, f"{found:,} of {of:,}")
