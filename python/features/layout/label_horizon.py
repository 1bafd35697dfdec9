"""How long labels take: up to which day the events of a dataset of ds have labels that stay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headrace.config import Spec
from headrace.features.table_ops.preparation import Preparation, midnight
from headrace.lake.landing import following
from headrace.lake.landing import midnight as landing_midnight


def seen_until(spec: Spec, ds: str) -> int | None:
    """The microsecond up to which the source of the labels tells what happened by the end of `ds`.

    None: labels are not made of another source, or of one without days: then it tells up to its newest row.
    """
    source = Preparation.from_spec(spec).label_source
    if source is None or not (spec.source.daily and spec.sources[source].source.daily):
        return None
    end = landing_midnight(spec.sources[source].source, following(ds))
    return min(midnight(ds, 1), int(end.timestamp()) * 1_000_000)


def last_labelled_day(spec: Spec, ds: str) -> str:
    """The last day (UTC) up to `ds` some of whose events have labels that stay."""
    wait = Preparation.from_spec(spec).label_wait
    if not wait:
        return ds
    # Labels of events before this instant are known.
    until = (seen_until(spec, ds) or midnight(ds, 1)) - wait
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=until - 1)).date().isoformat()
