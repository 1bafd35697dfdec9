"""Plan of a day's features, from the spec and ingest's manifest, without Spark.

It has the checked workflow, the days of events that are read (those of the split, and earlier ones for table
operators), and the tables at the versions that ingest's manifest pins.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

from headrace.config import Spec, TableSource
from headrace.errors import UserError
from headrace.features.layout.files import engine_of, split_ranges
from headrace.features.table_ops.preparation import Preparation, pin, spark_alone
from headrace.features.workflow.workflow import Workflow
from headrace.stage import Context
from headrace.stage.manifest import Input, Output


def checked_workflow(spec: Spec) -> Workflow:
    """Return the workflow of a pipeline, checked for `features.append`.

    Raises:
        UserError: see `Workflow`. With `features.append`: the engine cannot append, an operator may drop a feature, or
            an operator's result for a row depends on other rows or on the row's split.
    """
    workflow = Workflow.from_spec(spec)
    if spec.features.append is not None:
        _check_append(spec, workflow)
    return workflow


def _check_append(spec: Spec, workflow: Workflow) -> None:
    for i, chain in enumerate(workflow.chains):
        for j, step in chain.named_steps():
            if step.op.out_of_fold:
                raise UserError(
                    f"features.workflow[{i}].ops[{j}] ({step.op.name}): gives rows of the training range another value "
                    f"than others, so yesterday's validation files cannot become training files; leave features.append "
                    f"or the operator out"
                )
        if any(output.min_cardinality for output in chain.outputs.values()):
            raise UserError(
                f"features.workflow[{i}]: drop_low_cardinality may leave a feature out of one day's files and not of "
                f"another's; leave features.append or the operator out"
            )
    if spec.features.prepare and (step_name := spark_alone(spec)) is not None:
        raise UserError(
            f"{step_name}: features.append works on the lake's files, to which only filter, dropna, rename and such "
            f"lambda expressions are applied as Arrow evaluates like Spark (docs/time.md); leave features.append "
            f"or the operator out"
        )
    if engine_of(spec) != "arrow":
        raise UserError("features.append: only the Arrow engine appends; set features.engine: arrow, or append: false")


def first_day(spec: Spec, ds: str) -> str:
    """Return the first day whose events are read: the training range's first, or an earlier one for table operators."""
    if not spec.features.prepare:
        return split_ranges(spec, ds)[0][0]
    lookback_days = spec.features.history_days
    if lookback_days is None:
        lookback_days = Preparation.from_spec(spec).lookback_days
    return days_before_training(spec, ds, lookback_days)


def days_before_training(spec: Spec, ds: str, days: int) -> str:
    """Return the day `days` days before the first day of the training range."""
    return (date.fromisoformat(split_ranges(spec, ds)[0][0]) - timedelta(days=days)).isoformat()


def reads_by_day(spec: Spec) -> bool:
    """Return whether a dataset reads only some days of the events, not all of them or a snapshot."""
    return spec.source.daily and spec.features.split.by == "time"


def pinned_table(ctx: Context, source: str | None = None) -> Output:
    """Return the pinned table of events: the main source's, or a named one's.

    Raises:
        UserError: the manifest names none.
    """
    declared_source = ctx.spec.source if source is None else ctx.spec.sources[source].source
    name = ctx.ws.name_of(ctx.ws.events(ctx.spec.pipeline, source))
    if isinstance(declared_source, TableSource):
        facts = source_facts(ctx, source)
        if "table" not in facts:
            raise UserError(f"ingest's manifest of {ctx.ds} is of landing files; run ingest again")
        name = facts["table"]["name"]
    for output in ctx.upstream["ingest"].outputs:
        if output.name == name:
            return output
    raise UserError(f"ingest's manifest of {ctx.ds} names no table {name}; run ingest again")


def source_facts(ctx: Context, source: str | None) -> Mapping[str, Any]:
    """Return the facts of a source in ingest's manifest."""
    facts = ctx.upstream["ingest"].facts
    return facts if source is None else facts["sources"][source]


def other_inputs(ctx: Context) -> tuple[Input, ...]:
    """Return the joined tables at their newest versions, and the named sources at the versions in ingest's manifest.

    Raises:
        UserError: one is missing.
    """
    if not ctx.spec.features.prepare:
        return ()
    preparation = Preparation.from_spec(ctx.spec)
    pinned = (pinned_table(ctx, name) for name in preparation.sources)
    sources = (Input(kind="delta", name=p.name, version=p.version) for p in pinned)
    return (*pin(ctx.ws, preparation.externals), *sources)
