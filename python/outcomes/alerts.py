"""Metrics of the newest ripe day against the limits of `outcomes.alerts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.config import OutcomeAlert, Outcomes

#: A row of the metrics: the columns of headrace.outcomes.measure.SCHEMA, and `ripe`.
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """A figure beyond its limit."""

    served_ds: str
    label: str
    metric: str
    dimension: str
    value: str
    #: The figure; of `max_drop` the fall, as a share of the mean before.
    figure: float
    limit: float
    #: min, max or max_drop.
    kind: str
    action: str
    #: The limit's key in the spec.
    key: str

    def fact(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __str__(self) -> str:
        of = "" if self.dimension == "all" else f" of {self.dimension} {self.value}"
        told = {
            "min": f"is {self.figure:.4g}, below {self.limit:g}",
            "max": f"is {self.figure:.4g}, above {self.limit:g}",
            "max_drop": f"is {100 * self.figure:.3g} % below the mean of the ripe days before, "
            f"the limit is {100 * self.limit:g} %",
        }
        return f"{self.label} {self.metric}{of}, served on {self.served_ds}, {told[self.kind]} ({self.key})"


def judge(records: Sequence[Record], outcomes: Outcomes) -> list[Alert]:
    """Hold the newest ripe day of each label against the limits.

    Args:
        records: of several served days.
        outcomes: the section.
    """
    found: list[Alert] = []
    for number, limit in enumerate(outcomes.alerts):
        label = limit.label or next(iter(outcomes.labels))
        mine = [
            r
            for r in records
            if r["label"] == label and r["metric"] == limit.metric and r["dimension"] == limit.by and r["ripe"]
        ]
        newest = max((r["served_ds"] for r in mine), default=None)
        for record in mine:
            if record["served_ds"] == newest and record["rows"] >= limit.min_rows and record["estimate"] is not None:
                before = [
                    r["estimate"]
                    for r in mine
                    if r["value"] == record["value"] and r["served_ds"] < newest and r["estimate"] is not None
                ]
                found += _broken(record, before, limit, f"outcomes.alerts[{number}]")
    return found


def _broken(record: Record, before: Sequence[float], limit: OutcomeAlert, key: str) -> list[Alert]:
    figure = record["estimate"]
    about = {name: record[name] for name in ("served_ds", "label", "metric", "dimension", "value")}
    broken: list[tuple[str, float, float]] = []
    if limit.min is not None and figure < limit.min:
        broken.append(("min", figure, limit.min))
    if limit.max is not None and figure > limit.max:
        broken.append(("max", figure, limit.max))
    mean = sum(before) / len(before) if before else 0.0
    if limit.max_drop is not None and mean > 0 and (drop := 1 - figure / mean) > limit.max_drop:
        broken.append(("max_drop", drop, limit.max_drop))
    return [
        Alert(**about, figure=figure_, limit=limit_, kind=kind, action=limit.action, key=f"{key}.{kind}")
        for kind, figure_, limit_ in broken
    ]
