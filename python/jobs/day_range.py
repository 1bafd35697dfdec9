"""A range of days: which there are, and in which order the stages of an application run for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, timedelta

from headrace.config import Spec, parse_ds
from headrace.errors import UserError


def days_of(spec: Spec, ds: str, until: str | None) -> tuple[str, ...]:
    """The days from one to another, both included; `until`: None: the one day.

    Raises:
        UserError: they are the wrong way round, or the source has no days.
    """
    if until is None:
        return (ds,)
    last = parse_ds(until)
    if not spec.source.daily:
        raise UserError(f"--until: the source of '{spec.pipeline}' is one snapshot, not days; leave it out")
    if last < ds:
        raise UserError(f"--until: {last} is before {ds}")
    first = date.fromisoformat(ds)
    return tuple((first + timedelta(days=k)).isoformat() for k in range((date.fromisoformat(last) - first).days + 1))


def turns(stages: Sequence[str], days: Sequence[str], spec: Spec) -> Iterator[tuple[str, str]]:
    """(stage, day) in the order in which an application runs them: each stage for all days, oldest first.

    A stage of a day stands on the stages before it of that day and on days before it, and on nothing after. Only
    `ingest` begins with the days whose catch-up covers the others: these are then loaded together, in one pass.
    """
    for stage in stages:
        for ds in _loading_order(spec, days) if stage == "ingest" else days:
            yield stage, ds


def _loading_order(spec: Spec, days: Sequence[str]) -> list[str]:
    """The first day, whose catch-up is of days before it; those that cover all since the one before; the rest."""
    covered = 1 + min(s.catch_up_days for s in (spec.source, *(named.source for named in spec.sources.values())))
    covering = [days[0], *days[covered::covered], days[-1]]
    return list(dict.fromkeys([*covering, *days]))
