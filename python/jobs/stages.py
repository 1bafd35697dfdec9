"""Stages of a run: loaded by name, grouped into Spark applications, and ordered over the days of a range.

A stage's module is imported when it is loaded, so that a command pays only for the stages that it needs. Consecutive
stages with equal Spark settings share an application.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from headrace.config import Spark, Spec, parse_ds
from headrace.config.operations import settings_agree, with_slots
from headrace.config.stages import STAGES
from headrace.errors import UserError
from headrace.stage import Context, Stage, package_stage, stage_entries, stage_entry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.features.build.run import BuiltDay
    from headrace.stage.manifest import Output


def load_stage(name: str, spec: Spec | None = None) -> Stage:
    """Load the stage of that name: one of `headrace.config.stages.STAGES`, or of the section `stages` of a spec.

    Raises:
        KeyError: there is none.
        UserError: a package's stage is not valid.
    """
    if spec is not None and name in spec.stages:
        return package_stage(spec, name)
    module, _, factory = STAGES[name].implementation.partition(":")
    return cast(Stage, getattr(import_module(module), factory)())


def features_stage() -> Stage:
    """Return the stage `features` with the counts of its columns that the stage `drift` judges."""
    from headrace.features.build.stage import BuildFeatures

    def count(ctx: Context, day: BuiltDay, spark: SparkSession) -> tuple[Output, ...]:
        from headrace.quality.drift.count_day import count_day  # where the spec has the section `drift`

        return count_day(ctx, day, spark)

    return BuildFeatures(count)


def require_stage(spec: Spec, name: str) -> None:
    """Check that a pipeline has a stage.

    Raises:
        UserError: it does not.
    """
    entry = stage_entry(spec, name)
    if not entry.applies(spec):
        raise UserError(f"pipeline '{spec.pipeline}' has no '{entry.section}' section, so it has no such stage")


def spark_settings_of(stage: str, spec: Spec) -> Spark | None:
    """Return the settings of the session that a stage opens, or None where it opens none."""
    entry = stage_entry(spec, stage)
    if not entry.spark:
        return None
    return spec.spark if entry.slots is None else with_slots(spec.spark, attrgetter(entry.slots)(spec))


def applications(stages: Sequence[str], spec: Spec, isolated: bool = False) -> list[tuple[str, ...]]:
    """Return the stages of each application, in order.

    A stage without a session joins the application before it.

    Args:
        stages: names in the day's order.
        spec: the pipeline, which has all their sections.
        isolated: give each stage an application of its own.
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


def days_of(spec: Spec, ds: str, until: str | None) -> tuple[str, ...]:
    """Return the days from `ds` to `until`, both included; `until` None: `ds` alone.

    Raises:
        UserError: `until` is before `ds`, or the source has no days.
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


def submissions(
    groups: Sequence[Sequence[str]], days: Sequence[str], spec: Spec
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield (stages, days) of each application of a range, in order.

    One application runs a group of stages for all days. But if stages that run day by day (see `execution_order`) are
    in several groups, the other stages run first, for all days; then these groups run, one day after another.

    Args:
        groups: the stages of each application (`applications`).
        days: the range, oldest day first.
        spec: the pipeline.
    """
    by_day = [tuple(stage for stage in group if _waits_for_the_day_before(stage, spec)) for group in groups]
    if len(days) == 1 or sum(map(bool, by_day)) < 2:
        for group in groups:
            yield tuple(group), tuple(days)
        return
    for group, later in zip(groups, by_day, strict=True):
        if first := tuple(stage for stage in group if stage not in later):
            yield first, tuple(days)
    for ds in days:
        for group in filter(None, by_day):
            yield group, (ds,)


def execution_order(stages: Sequence[str], days: Sequence[str], spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield (stage, day) in the order in which an application runs them: each stage for all days, oldest first.

    A stage of a day depends on earlier stages of that day and on earlier days, never on later ones. `ingest` begins
    with the days whose catch-up covers the others, which are then loaded together in one pass. With a gate or a
    challenger, a day's training depends on whether the models of the day before were promoted. So the stages from
    `train` on run day by day: a range has the same result as its days one by one.
    """
    by_day = [stage for stage in stages if _waits_for_the_day_before(stage, spec)]
    for stage in stages:
        if stage not in by_day:
            for ds in _loading_order(spec, days) if stage == "ingest" else days:
                yield stage, ds
    for ds in days:
        for stage in by_day:
            yield stage, ds


def _waits_for_the_day_before(stage: str, spec: Spec) -> bool:
    """Return whether a stage of a day depends on later stages of the day before."""
    if spec.gate is None and spec.challenger is None:
        return False
    order = list(stage_entries(spec))
    return stage in order and order.index(stage) >= order.index("train")


def _loading_order(spec: Spec, days: Sequence[str]) -> list[str]:
    """Return the days in the order of loading: the first, which catches up on earlier days; those whose catch-up
    covers the days in between; the rest.
    """
    covered = 1 + min(s.catch_up_days for s in (spec.source, *(named.source for named in spec.sources.values())))
    covering = [days[0], *days[covered::covered], days[-1]]
    return list(dict.fromkeys([*covering, *days]))
