"""The audit of a staged day by the warehouse that has it: its rows are read once, and once more by items."""

from __future__ import annotations

from headrace.config.publish import Audit
from headrace.publish.audit.counts import count_day
from headrace.publish.audit.distribution import distribution_checks, score_edges
from headrace.publish.audit.integrity import Limits, integrity_checks
from headrace.publish.target import Check, StagedDay


def day_checks(
    staged: StagedDay, limits: Limits, asked: Audit | None, candidates: int | None = None, users: int | None = None
) -> list[Check]:
    """What must always hold, and what `publish.audit` asks for about the day beside the one before it.

    Args:
        staged: the day.
        limits: what must always hold.
        asked: None: nothing.
        candidates: items that could be given; None: unknown.
        users: users that were scored; None: unknown.
    """
    edges = [] if asked is None else score_edges(staged, asked)
    counts = count_day(staged, limits, edges)
    checks = integrity_checks(staged, limits, counts)
    if asked is not None:
        checks += distribution_checks(staged, asked, limits.item, counts, edges, candidates, users)
    return checks
