"""The sections `outcomes` and `experiments`: what users did with lists, and models beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from headrace.config.evaluation import Bootstrap
from headrace.config.score import ModelChoice, Score, version_as_text
from headrace.config.section import NAME, Section, parse_ds
from headrace.config.table import NamedSource, Table
from headrace.config.train import Task
from headrace.errors import nearest

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
    #: Groups that are checked one by one: all rows, each model, each `arm:EXPERIMENT` or `slice:NAME`.
    by: str = Field(default="all", pattern=r"^(all|model|arm:.+|slice:.+)$")
    #: An alert is raised below it.
    min: float | None = None
    #: An alert is raised above it.
    max: float | None = None
    #: The largest fall below the mean of the ripe days before it, as a share of that mean.
    max_drop: float | None = Field(default=None, gt=0, le=1)
    #: Groups with fewer rows are not checked; fewer rows of the whole day raise an alert.
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

    #: Labels by name. The scores are the probability of the first one.
    labels: Mapping[str, OutcomeLabel] = Field(default={"click": OutcomeLabel()}, min_length=1)
    #: Which rows of a list count. logged: those with an event of the main source while the list was shown, such as an
    #: impression; all: every row, where the log has no impressions.
    shown: Literal["logged", "all"] = "logged"
    #: Days for which a day's lists are shown.
    live_days: int = Field(default=1, ge=1)
    #: Hours from the end of the day until its lists are shown.
    starts_after_hours: float = Field(default=0.0, ge=0)
    #: Served days with ripe labels that are read besides those with provisional ones: how late events land is learned
    #: from them.
    history_days: int = Field(default=7, ge=1)
    #: Lengths by which lists are measured (hr_at_K).
    k: tuple[int, ...] = Field(default=(1, 10), min_length=1)
    #: Slices by name: expressions of Spark's SQL over columns of the main source's events; a value is a slice.
    slices: Mapping[str, str] = Field(default_factory=dict)
    #: Values of an expression that become slices at most, the most frequent; the others are one slice.
    max_slices: int = Field(default=20, ge=1)
    #: Intervals of all metrics, over users; null: none.
    bootstrap: Bootstrap | None = Bootstrap()
    #: Limits that raise an alert.
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


#: Tables of the stage.
TABLES = ("outcomes", "outcome_metrics")


def days_until_ripe(outcomes: Outcomes, name: str, main: NamedSource, sources: Mapping[str, NamedSource]) -> int:
    """Days from a served day to the landing day with which the last event that counts has had time to land.

    Args:
        outcomes: the section.
        name: of the label.
        main: the main source and its table.
        sources: the named ones.
    """
    label = outcomes.labels[name]
    of_label = main if label.from_ is None else sources[label.from_]
    late = of_label.table.late_days if label.late_days is None else label.late_days
    days = label.within_days + late + (of_label.source.timezone != "UTC")
    if outcomes.shown == "logged":  # what was shown is to be known, too
        days = max(days, outcomes.live_days + main.table.late_days + (main.source.timezone != "UTC"))
    # Of a list that is shown from noon on, windows end at noon, a day later.
    return days + math.ceil(outcomes.starts_after_hours / 24)


def check_outcomes(
    outcomes: Outcomes,
    score: Score | None,
    main: NamedSource,
    sources: Mapping[str, NamedSource],
    label_column: str,
    tasks: Mapping[str, Task],
) -> None:
    """See that sources and columns are there, and that training waits for labels as long as they take.

    Args:
        outcomes: the section.
        score: that makes the lists.
        main: the main source and its table.
        sources: the named ones.
        label_column: `features.label`.
        tasks: `train.tasks`.

    Raises:
        ValueError: with the key and what is wrong.
    """
    if score is None:
        raise ValueError("outcomes are of lists: add a score section")
    for name in TABLES:
        if name in sources:
            raise ValueError(f"sources: '{name}' is the name of a table of the section outcomes; take another one")
    sources_read = {"main": main} | {
        f"sources.{label.from_}": _named(name, label, sources)
        for name, label in outcomes.labels.items()
        if label.from_ is not None
    }
    for place, source in sources_read.items():
        table = "table" if place == "main" else f"{place}.table"
        if source.table.event_time is None:
            raise ValueError(f"outcomes are of events with a time, and {table}.event_time is not set")
        if not source.source.daily:
            raise ValueError(f"outcomes are of events that land by day, and the source of {table} is one snapshot")
        for key in (score.user.key, score.item.key):
            _check_column("score", key, source.table, table)
    for name, label in outcomes.labels.items():
        source = main if label.from_ is None else sources[label.from_]
        column = label.column or (label_column if label.from_ is None else None)
        if column is not None:
            place = "table" if label.from_ is None else f"sources.{label.from_}.table"
            _check_column(f"outcomes.labels.{name}", column, source.table, place)
        if label.from_ is None:
            _check_tasks(name, column, days_until_ripe(outcomes, name, main, sources), tasks)


def _named(name: str, label: OutcomeLabel, sources: Mapping[str, NamedSource]) -> NamedSource:
    assert label.from_ is not None
    if label.from_ not in sources:
        raise ValueError(
            f"outcomes.labels.{name}.from: '{label.from_}' is no source of `sources`{nearest(label.from_, sources)}"
        )
    return sources[label.from_]


def _check_column(section: str, column: str, table: Table, table_key: str) -> None:
    names = [c.name for c in table.columns]
    if column not in names:
        raise ValueError(f"{section}: column '{column}' is not declared in {table_key}.columns{nearest(column, names)}")


def _check_tasks(name: str, column: str | None, days: int, tasks: Mapping[str, Task]) -> None:
    """Check that a task that waits for a label waits until the label is final."""
    for task_name, task in tasks.items():
        if task.label == column and task.known_after is not None and task.known_after.days < days:
            raise ValueError(
                f"train.tasks.{task_name}.known_after.days is {task.known_after.days:g}, and outcomes.labels.{name} is "
                f"of the same column and ripe after {days} days (within_days and late_days): set it to {days}"
            )


#: Shares are kept to so many parts of all users.
PARTS = 10_000


class ExperimentArm(Section):
    """An arm of an experiment: its share of the users, and the model of their lists."""

    #: Model of the arm's lists: as `score.model`; null: that of `score.model` itself.
    model: ModelChoice | None = None
    #: Share of the users who take part, above 0; without any, arms have equal shares. Changing shares moves users,
    #: `percent` does not.
    share: float | None = Field(default=None, gt=0, le=1)

    _text = field_validator("model", mode="before", json_schema_input_type=str | int | None)(version_as_text)


class StopRule(Section):
    """Rules by which the daily run stops an arm: its users get the control's lists from then on."""

    #: Least difference by which the arm must be worse, in the metric's unit: the better end of its sequential interval
    #: is on that side.
    worse_than: float = Field(default=0.0, ge=0)
    #: Days with ripe labels before the rule applies.
    min_days: int = Field(default=1, ge=1)


class Experiment(Section):
    """Assignment of users to arms by a hash, the same every day and independent of other experiments' arms.

    A user takes part in one of the experiments whose arms have models: the first of the section that takes the user.
    """

    #: Salt of the hash; another salt assigns the users anew. null: the experiment's name.
    salt: str | None = Field(default=None, min_length=1)
    #: Arms by name, with a model or without one (the site then decides what the column `arms` means).
    arms: Mapping[str, ExperimentArm] = Field(min_length=2)
    #: The arm with which the others are compared; null: the first.
    control: str | None = None
    #: Percentage of all users who take part; raising it moves nobody to another arm.
    percent: float = Field(default=100.0, ge=0, le=100)
    #: The first day whose lists have arms; null: any.
    start: str | None = None
    #: The last day whose lists have arms; null: no last day.
    end: str | None = None
    #: One of `outcomes.labels`; null: the first.
    label: str | None = None
    #: rate: the label over the rows that were shown, of clicks the click-through rate. per_user: the label's sum over
    #: the users.
    metric: Literal["rate", "per_user"] = "rate"
    #: Whether a lower metric is the better one.
    lower_is_better: bool = False
    #: Confidence of the intervals; the sequential one of each of several arms is wider, so that it holds for all of
    #: them.
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    #: Expected effect as a share of the metric before the start (without such days, of the control's first ripe one).
    #: Sequential bounds are narrowest for it.
    expected_effect: float = Field(default=0.1, gt=0)
    #: Days before the start whose outcomes serve as the covariate of CUPED; 0: none.
    before_days: int = Field(default=7, ge=0)
    #: Least number of users of an arm, and of the control, for a conclusion.
    min_users: int = Field(default=100, ge=2)
    #: Rule that stops an arm; null: arms are stopped by hand alone (`headrace experiment stop`).
    stop: StopRule | None = None

    @field_validator("start", "end", mode="before")
    @classmethod
    def _days(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        return None if value is None else parse_ds(str(value))

    @field_validator("arms")
    @classmethod
    def _names(cls, value: Mapping[str, ExperimentArm]) -> Mapping[str, ExperimentArm]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Experiment:
        shares = [arm.share for arm in self.arms.values() if arm.share is not None]
        if shares and len(shares) < len(self.arms):
            raise ValueError("arms: give each arm a share, or none of them")
        if shares and abs(sum(shares) - 1) > 1e-6:
            total = f"{sum(shares):g}"
            raise ValueError(f"arms: the shares' sum is {total}, not 1; how many users take part says `percent`")
        if min(self.shares.values()) < 1 / PARTS:
            raise ValueError(f"arms: shares are kept to {1 / PARTS:g}, and one is less")
        if self.control is not None and self.control not in self.arms:
            raise ValueError(f"control: '{self.control}' is none of arms ({', '.join(self.arms)})")
        if self.start is not None and self.end is not None and self.end < self.start:
            raise ValueError(f"end is {self.end}, before start, {self.start}")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Return each arm's share of the users who take part; the sum is 1."""
        return {name: 1 / len(self.arms) if arm.share is None else arm.share for name, arm in self.arms.items()}

    @property
    def control_arm(self) -> str:
        """Return the arm that the others are compared with."""
        return self.control or next(iter(self.arms))

    @property
    def treatments(self) -> tuple[str, ...]:
        """Return the names of the arms besides the control."""
        return tuple(name for name in self.arms if name != self.control_arm)

    @property
    def has_models(self) -> bool:
        """Return whether an arm has a model of its own."""
        return any(arm.model is not None for arm in self.arms.values())

    def live(self, ds: str) -> bool:
        """Return whether the lists of a day have the experiment's arms."""
        return (self.start is None or self.start <= ds) and (self.end is None or ds <= self.end)


def check_alerts(outcomes: Outcomes, experiments: Mapping[str, Experiment]) -> None:
    """Check that alerts by arms name experiments of the pipeline.

    Raises:
        ValueError: one is not, with the nearest.
    """
    for i, alert in enumerate(outcomes.alerts):
        kind, _, name = alert.by.partition(":")
        if kind == "arm" and name not in experiments:
            raise ValueError(
                f"outcomes.alerts[{i}].by: '{name}' is none of experiments{nearest(name, experiments)} (there are: "
                f"{', '.join(experiments) or 'none'})"
            )


def check_experiments(experiments: Mapping[str, Experiment], score: Score | None, outcomes: Outcomes | None) -> None:
    """Check that a pipeline with experiments has lists, outcomes, and the labels that the experiments name.

    Raises:
        ValueError: with the key and what is wrong.
    """
    if score is None:
        raise ValueError("experiments are on lists: add a score section")
    if outcomes is None:
        raise ValueError("experiments are told by what followed the lists: add the section `outcomes` ({} is a start)")
    if "arms" in (score.user.key, score.item.key):
        raise ValueError("experiments: 'arms' is the name of a column that they make; rename the key of score")
    salts: dict[str, str] = {}
    for name, experiment in experiments.items():
        key = f"experiments.{name}"
        if not NAME.fullmatch(name):
            raise ValueError(f"experiments: '{name}' must match {NAME.pattern}")
        same_salt = salts.setdefault(experiment.salt or name, name)
        if same_salt != name:
            raise ValueError(
                f"{key}.salt: '{experiment.salt or name}' is the salt of '{same_salt}', so that their arms "
                f"were the same; give each its own"
            )
        if experiment.label is not None and experiment.label not in outcomes.labels:
            known = ", ".join(outcomes.labels)
            raise ValueError(
                f"{key}.label: '{experiment.label}' is none of outcomes.labels ({known})"
                f"{nearest(experiment.label, outcomes.labels)}"
            )
