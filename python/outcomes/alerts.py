"""Metrics of the last ripe day against the limits of `outcomes.alerts`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    #: min, max, max_drop or min_rows; of min_rows the figure is the number of rows that were shown.
    kind: str
    action: str
    #: The limit's key in the spec.
    key: str

    def fact(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "min_rows":
            few = f"{self.figure:.0f} rows served on {self.served_ds} were shown, fewer than {self.limit:g}"
            return f"{self.label}: {few} ({self.key})"
        of = "" if self.dimension == "all" else f" of {self.dimension} {self.value}"
        told = {
            "min": f"is {self.figure:.4g}, below {self.limit:g}",
            "max": f"is {self.figure:.4g}, above {self.limit:g}",
            "max_drop": f"is {100 * self.figure:.3g} % below the mean of the ripe days before, "
            f"the limit is {100 * self.limit:g} %",
        }
        return f"{self.label} {self.metric}{of}, served on {self.served_ds}, {told[self.kind]} ({self.key})"


def judge(
    records: Sequence[Record], outcomes: Outcomes, last_ripe: Mapping[str, str], served: Collection[str]
) -> list[Alert]:
    """Hold the last ripe day of each label against the limits; a day of which too little was shown is an alert itself.

    Args:
        records: of several served days.
        outcomes: the section.
        last_ripe: by label, the day to be judged.
        served: the days whose lists were there.
    """
    found: list[Alert] = []
    for number, limit in enumerate(outcomes.alerts):
        label = limit.label or next(iter(outcomes.labels))
        day, key = last_ripe[label], f"outcomes.alerts[{number}]"
        of_label = [r for r in records if r["label"] == label]
        shown = max((r["rows"] for r in of_label if r["served_ds"] == day and r["dimension"] == "all"), default=0)
        if day in served and shown < limit.min_rows:
            found.append(
                Alert(
                    served_ds=day,
                    label=label,
                    metric=limit.metric,
                    dimension="all",
                    value="",
                    figure=float(shown),
                    limit=float(limit.min_rows),
                    kind="min_rows",
                    action=limit.action,
                    key=f"{key}.min_rows",
                )
            )
            continue
        mine = [r for r in of_label if r["metric"] == limit.metric and r["dimension"] == limit.by and r["ripe"]]
        for record in mine:
            if record["served_ds"] == day and record["rows"] >= limit.min_rows and record["estimate"] is not None:
                before = [
                    r["estimate"]
                    for r in mine
                    if r["value"] == record["value"] and r["served_ds"] < day and r["estimate"] is not None
                ]
                found += _broken(record, before, limit, key)
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
