"""The section `outcomes`: what users did with the lists that they were served, and when that is known for good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.config.evaluation import Bootstrap
from headrace.config.section import NAME, Section

#: Columns of the outcomes table that no label may be called like.
_TAKEN = ("ds", "served_ds", "rank", "score", "model_version", "arms", "propensity", "shown_landed")


class OutcomeLabel(Section):
    """Something that a user may do with an item of the list: an event of both within a window."""

    #: A column of numbers or booleans: events above 0 count. Null: `features.label`; of a named source: all its events.
    column: str | None = None
    #: A named source that the events are in; null: the main one.
    from_: str | None = Field(default=None, alias="from")
    #: Days, from when the list is first shown, within which the event counts.
    within_days: int = Field(default=1, ge=1)
    #: Days after its own on which an event may land for the label to be waited for; null: `table.late_days` of its
    #: source.
    late_days: int | None = Field(default=None, ge=0)

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class OutcomeAlert(Section):
    """A limit of a metric of the last day whose label is ripe."""

    #: rate, auc, log_loss, calibration or hr_at_K.
    metric: str
    #: One of `labels`; null: the first.
    label: str | None = None
    #: What it is checked for, value by value: all rows, each model, each `arm:EXPERIMENT` or `slice:NAME`.
    by: str = Field(default="all", pattern=r"^(all|model|arm:.+|slice:.+)$")
    #: Below it, there is an alert.
    min: float | None = None
    #: Above it, there is one.
    max: float | None = None
    #: The largest fall below the mean of the ripe days before it, as a share of that mean.
    max_drop: float | None = Field(default=None, gt=0, le=1)
    #: With fewer rows it is not checked; fewer of the whole day are an alert.
    min_rows: int = Field(default=100, ge=1)
    #: warn: a line in the log, in the report and in the manifest. stop: the day ends there, with exit code 3.
    action: Literal["warn", "stop"] = "warn"

    @model_validator(mode="after")
    def _limits(self) -> OutcomeAlert:
        if self.min is None and self.max is None and self.max_drop is None:
            raise ValueError("an alert has a limit: min, max or max_drop")
        return self


class Outcomes(Section):
    """Lists of earlier days and the events that followed, as far as they have landed; metrics of them by day.

    A day's lists are shown from the end of that day (UTC) on. A label is ripe when every event that counts has had time
    to land, and provisional before.
    """

    #: By name; the first is the one whose probability the scores are.
    labels: Mapping[str, OutcomeLabel] = Field(default={"click": OutcomeLabel()}, min_length=1)
    #: Which rows of a list count. logged: those with an event of the main source while the list was shown, such as an
    #: impression; all: every row, where the log has no impressions.
    shown: Literal["logged", "all"] = "logged"
    #: Days for which a day's lists are shown.
    live_days: int = Field(default=1, ge=1)
    #: Hours from the end of the day until its lists are shown.
    starts_after_hours: float = Field(default=0.0, ge=0)
    #: Served days with ripe labels that are looked at besides those with provisional ones: how late events land is
    #: learned from them.
    history_days: int = Field(default=7, ge=1)
    #: Lists are measured by their first so many items (`hr_at_K`).
    k: tuple[int, ...] = Field(default=(1, 10), min_length=1)
    #: Slices by name: expressions of Spark's SQL over columns of the main source's events; a value is a slice.
    slices: Mapping[str, str] = Field(default_factory=dict)
    #: Values of an expression that become slices at most, the most frequent; the others are one slice.
    max_slices: int = Field(default=20, ge=1)
    #: Intervals of all metrics, over users; null: none.
    bootstrap: Bootstrap | None = Bootstrap()
    #: Limits.
    alerts: tuple[OutcomeAlert, ...] = ()

    @field_validator("labels", "slices")
    @classmethod
    def _names(cls, value: Mapping[str, object]) -> Mapping[str, object]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
        return value

    @field_validator("k")
    @classmethod
    def _lengths(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError("lengths of lists are at least 1")
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _fits(self) -> Outcomes:
        columns = [c for name in self.labels for c in (name, f"{name}_ripe", f"{name}_landed")]
        for name in columns:
            if name in _TAKEN or name.startswith("slice_") or columns.count(name) > 1:
                raise ValueError(f"labels: '{name}' is the name of a column of the outcomes table; rename the label")
        for name, label in self.labels.items():
            if label.within_days < self.live_days:
                raise ValueError(
                    f"labels.{name}.within_days is {label.within_days}, and lists are shown for {self.live_days} days "
                    f"(live_days): a window is at least as long"
                )
        for i, alert in enumerate(self.alerts):
            if alert.label is not None and alert.label not in self.labels:
                raise ValueError(f"alerts[{i}].label: '{alert.label}' is none of labels ({', '.join(self.labels)})")
            if alert.metric not in self.metrics:
                raise ValueError(f"alerts[{i}].metric: '{alert.metric}' is none of {', '.join(self.metrics)}")
            kind, _, name = alert.by.partition(":")
            if kind == "slice" and name not in self.slices:
                raise ValueError(f"alerts[{i}].by: '{name}' is none of slices ({', '.join(self.slices) or 'none'})")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what is measured."""
        return ("rate", "auc", "log_loss", "calibration", *(f"hr_at_{k}" for k in self.k))
