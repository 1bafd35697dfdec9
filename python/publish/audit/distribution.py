"""The staged day beside the newest published one: scores, items, users; asked of the warehouse in SQL."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.audit import Audit
from headrace.psi import psi
from headrace.publish.audit.limits import within
from headrace.publish.target import Check, PublishedDay, StagedDay

#: Bins of the scores.
_TENTHS = 10


def distribution_checks(
    staged: StagedDay, limits: Audit, user: str, item: str, candidates: int | None, users: int | None
) -> Iterator[Check]:
    """The checks that `limits` asks for.

    Args:
        staged: the day.
        limits: see there.
        user: the users' column.
        item: the items' column.
        candidates: items that could be given; None: unknown, and coverage is not checked.
        users: users that were scored; None likewise.
    """
    before = staged.previous
    if limits.max_score_psi is not None:
        name = "PSI of the scores"
        yield (
            _without_past(name)
            if before is None
            else within(name, _score_psi(staged, before), None, limits.max_score_psi, f"against {before.ds}")
        )
    if limits.max_item_psi is not None:
        name = "PSI of the items"
        yield (
            _without_past(name)
            if before is None
            else within(
                name,
                _item_psi(staged, before, item, limits.top_items),
                None,
                limits.max_item_psi,
                f"against {before.ds}",
            )
        )
    if limits.max_new_items is not None:
        name = "share of rows with a new item"
        yield _without_past(name) if before is None else _new_items(staged, before, item, name, limits.max_new_items)
    if limits.min_coverage is not None and candidates:
        yield _share(staged, item, candidates, "share of the candidate items given", limits.min_coverage)
    if limits.min_users is not None and users:
        yield _share(staged, user, users, "share of the scored users with a list", limits.min_users)


def _without_past(name: str) -> Check:
    return Check(name, 0.0, "compared with an earlier day", True, "no earlier day")


def _score_psi(staged: StagedDay, before: PublishedDay) -> float | None:
    score = staged.quote("score")
    tenths = staged.query(
        f"SELECT min(t.x) AS low FROM (SELECT {score} AS x, ntile({_TENTHS}) OVER (ORDER BY {score}) AS tenth "
        f"FROM {before.relation}) AS t GROUP BY t.tenth ORDER BY low"
    )
    # Equal scores at a cut belong to the bin above it, on both days.
    edges = sorted({float(low) for (low,) in tenths})[1:]
    if not edges:
        edges = [float(low) for (low,) in tenths]
    return psi(*(_counts(staged, relation, edges) for relation in (before.relation, staged.relation)))


def _counts(staged: StagedDay, relation: str, edges: list[float]) -> list[int]:
    """Rows by bin: below the first edge, from each edge to the next, from the last on."""
    score = staged.quote("score")
    whens = " ".join(f"WHEN {score} < {edge!r} THEN {i}" for i, edge in enumerate(edges))
    found = staged.query(
        f"SELECT b.bin, count(*) FROM (SELECT CASE {whens} ELSE {len(edges)} END AS bin FROM {relation}) AS b "
        f"GROUP BY b.bin"
    )
    by_bin = {int(bin_): int(n) for bin_, n in found}
    return [by_bin.get(i, 0) for i in range(len(edges) + 1)]


def _item_psi(staged: StagedDay, before: PublishedDay, item: str, top: int) -> float | None:
    name = staged.quote(item)

    def counts(relation: str) -> str:
        return f"SELECT {name} AS item, count(*) AS n FROM {relation} GROUP BY {name}"

    found = staged.query(
        f"SELECT p.n, COALESCE(s.n, 0) FROM (SELECT c.item, c.n FROM ({counts(before.relation)}) AS c "
        f"ORDER BY c.n DESC, c.item LIMIT {top}) AS p "
        f"LEFT JOIN ({counts(staged.relation)}) AS s ON s.item = p.item"
    )
    expected, actual = ([int(row[side]) for row in found] for side in (0, 1))
    return psi([*expected, before.rows - sum(expected)], [*actual, staged.rows - sum(actual)])


def _new_items(staged: StagedDay, before: PublishedDay, item: str, name: str, limit: float) -> Check:
    column = staged.quote(item)
    found = staged.query(
        f"SELECT count(*) FROM {_aliased(staged.relation, 's')} "
        f"LEFT JOIN (SELECT DISTINCT {column} AS item FROM {before.relation}) AS p ON p.item = s.{column} "
        f"WHERE p.item IS NULL"
    )
    share = int(found[0][0]) / staged.rows if staged.rows else None
    return within(name, share, None, limit, f"against {before.ds}")


def _aliased(relation: str, alias: str) -> str:
    return f"(SELECT * FROM {relation}) AS {alias}"


def _share(staged: StagedDay, column: str, of: int, name: str, limit: float) -> Check:
    found = int(staged.query(f"SELECT count(DISTINCT {staged.quote(column)}) FROM {staged.relation}")[0][0])
    return within(name, found / of, limit, None, f"{found:,} of {of:,}")
