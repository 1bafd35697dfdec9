"""Grouping of stages into Spark applications: consecutive stages whose Spark settings agree share one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from headrace.config import Spark, Spec
from headrace.lake.spark.session import agree as settings_agree
from headrace.lake.spark.session import with_slots
from headrace.stages import STAGES


def spark_settings_of(stage: str, spec: Spec) -> Spark | None:
    """Return the settings of the session that a stage opens, or None where it opens none."""
    entry = STAGES[stage]
    if not entry.spark:
        return None
    return spec.spark if entry.slots is None else with_slots(spec.spark, attrgetter(entry.slots)(spec))


def applications(stages: Sequence[str], spec: Spec, isolated: bool = False) -> list[tuple[str, ...]]:
    """Stages by application, in order.

    A stage without a session goes with those before it.

    Args:
        stages: in the day's order.
        spec: has all their sections.
        isolated: an application for each.
    """
    groups: list[list[str]] = []
    shared: Spark | None = None
    for stage in stages:
        settings = spark_settings_of(stage, spec)
        if groups and not isolated and (settings is None or shared is None or settings_agree(shared, settings)):
            groups[-1].append(stage)
            shared = shared or settings
        else:
            groups.append([stage])
            shared = settings
    return [tuple(group) for group in groups]
