"""What `outcomes` names in other sections, and how long its labels take to be known."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.config.named_source import NamedSource
from headrace.config.outcomes import OutcomeLabel, Outcomes
from headrace.config.score import Score
from headrace.config.table import Table
from headrace.config.tasks import Task
from headrace.errors import nearest

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
    read = {"main": main} | {
        f"sources.{label.from_}": _named(name, label, sources)
        for name, label in outcomes.labels.items()
        if label.from_ is not None
    }
    for where, source in read.items():
        table = "table" if where == "main" else f"{where}.table"
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
            where = "table" if label.from_ is None else f"sources.{label.from_}.table"
            _check_column(f"outcomes.labels.{name}", column, source.table, where)
        if label.from_ is None:
            _check_tasks(name, column, days_until_ripe(outcomes, name, main, sources), tasks)


def _named(name: str, label: OutcomeLabel, sources: Mapping[str, NamedSource]) -> NamedSource:
    assert label.from_ is not None
    if label.from_ not in sources:
        raise ValueError(
            f"outcomes.labels.{name}.from: '{label.from_}' is no source of `sources`{nearest(label.from_, sources)}"
        )
    return sources[label.from_]


def _check_column(where: str, column: str, table: Table, place: str) -> None:
    names = [c.name for c in table.columns]
    if column not in names:
        raise ValueError(f"{where}: column '{column}' is not declared in {place}.columns{nearest(column, names)}")


def _check_tasks(name: str, column: str | None, days: int, tasks: Mapping[str, Task]) -> None:
    """A task that waits for a label waits until it is ripe."""
    for task_name, task in tasks.items():
        if task.label == column and task.known_after is not None and task.known_after.days < days:
            raise ValueError(
                f"train.tasks.{task_name}.known_after.days is {task.known_after.days:g}, and outcomes.labels.{name} is "
                f"of the same column and ripe after {days} days (within_days and late_days): set it to {days}"
            )
