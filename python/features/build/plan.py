"""Facts of a day's features that the spec alone decides, without Spark: the checked workflow, the days of events.

The days of events are those of the split, and those before that table operators look at.
"""

from __future__ import annotations

from datetime import date, timedelta

from headrace.config import Spec
from headrace.errors import UserError
from headrace.features.layout.files import engine_of
from headrace.features.layout.split_rule import split_ranges
from headrace.features.table_ops.preparation import Preparation, spark_alone
from headrace.features.workflow.workflow import Workflow


def checked_workflow(spec: Spec) -> Workflow:
    """Return the workflow of a pipeline, whose dataset can be made as `features.append` says.

    Raises:
        UserError: see `Workflow`; or with `features.append` an operator whose result for a row depends on other rows or
            on whether it trains, or that may drop a feature, or an engine that does not append.
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
        if any(end.min_cardinality for end in chain.outputs.values()):
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
    """Return the first day whose events are read: that of the training range, or earlier ones that table operators look
    at.
    """
    if not spec.features.prepare:
        return split_ranges(spec, ds)[0][0]
    back = spec.features.history_days
    if back is None:
        back = Preparation.from_spec(spec).lookback_days
    return days_before_training(spec, ds, back)


def days_before_training(spec: Spec, ds: str, days: int) -> str:
    """Return the day so many days before the training range's first."""
    return (date.fromisoformat(split_ranges(spec, ds)[0][0]) - timedelta(days=days)).isoformat()


def by_days(spec: Spec) -> bool:
    """Return whether a dataset is made of some days of the events; else of all, or of a snapshot."""
    return spec.source.daily and spec.features.split.by == "time"
