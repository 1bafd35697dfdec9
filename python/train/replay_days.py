"""The days whose rows are replayed (`retrain.replay`)."""

from __future__ import annotations

from datetime import date, timedelta

from headrace.config import Spec
from headrace.features.layout.day_ranges import split_ranges


def replay_days(spec: Spec, ds: str) -> list[str]:
    """The days from whose datasets a training of `ds` draws, where they are there, the oldest first.

    Of each it is the split `valid`, whose days lie before the window of `ds` and in no other dataset's of the list;
    A dataset that has a day of the rows of `forgetting_day` is not drawn from, since what is forgotten is measured on
    them. Empty: nothing is replayed.
    """
    replay = None if spec.retrain is None else spec.retrain.replay
    if spec.retrain is None or replay is None:
        return []
    first = split_ranges(spec, ds)[0][0]
    day = date.fromisoformat(ds)
    while split_ranges(spec, day.isoformat())[1][1] >= first:
        day -= timedelta(days=1)
    each = spec.features.split.valid_days
    found = [(day - timedelta(days=back)).isoformat() for back in range(0, replay.days, each)]
    measured_on = spec.retrain.forgetting_day
    if measured_on is None:
        return sorted(found)
    begin, end = split_ranges(spec, measured_on)[1]
    ranges = {d: split_ranges(spec, d)[1] for d in found}
    return sorted(d for d, (from_, to) in ranges.items() if to < begin or end < from_)
