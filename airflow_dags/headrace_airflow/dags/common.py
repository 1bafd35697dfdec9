"""Parts that the DAGs share."""

from __future__ import annotations

from datetime import timedelta
from itertools import groupby, pairwise
from typing import Any

import pendulum
from airflow.sdk import DAG, BaseOperator, Param

from headrace_airflow.job import HeadraceGate, HeadraceJob
from headrace_airflow.notify import day_done, task_failed
from headrace_airflow.pipelines import Pipeline
from headrace_airflow.settings import SETTINGS

#: The day of a run, one expression for all tasks: the one asked for, else the asset's partition, else the start of the
#: data interval, else (a run by hand has no interval) the day on which it was started.
DS = (
    "{{ params.ds or (partition_key | default(none)) or "
    "(((data_interval_start | default(none)) or dag_run.run_after) | ds) }}"
)

DEFAULT_ARGS: dict[str, Any] = {
    "owner": "headrace",
    # Of failures that another try may mend: what the user must mend fails at once, and waiting is no try (ends.py).
    "retries": 2,
    "retry_delay": timedelta(seconds=SETTINGS.retry_seconds),
    "retry_exponential_backoff": 3.0,
    "max_retry_delay": timedelta(hours=1),
    "on_failure_callback": task_failed,
    # A skipped stage does not hold up those after it.
    "trigger_rule": "none_failed",
}


def day_param() -> Param:
    """Return the day's parameter, for a run by hand."""
    return Param(
        None,
        type=["null", "string"],
        format="date",
        description="The day, YYYY-MM-DD; empty: the one that the run is for",
    )


def make_dag(pipeline: Pipeline, kind: str, description: str, hours: float, **kwargs: Any) -> DAG:
    """Return an empty DAG of a kind."""
    settings: dict[str, Any] = {
        "schedule": None,
        "params": {"ds": day_param()},
        "start_date": pendulum.datetime(2026, 1, 1, tz="UTC"),
        "catchup": False,
        "max_active_runs": 1,
        "dagrun_timeout": timedelta(hours=hours),
        "default_args": DEFAULT_ARGS,
        "tags": ["headrace", pipeline.name],
    }
    return DAG(dag_id=pipeline.dag_id(kind), description=description, **(settings | kwargs))


def chain_stages(
    pipeline: Pipeline,
    kind: str,
    ds: str,
    first: BaseOperator | None = None,
    last: BaseOperator | None = None,
    depends_on_past: bool = False,
) -> None:
    """Chain the stages of a kind in order, those with their own leases in parallel; a gate may skip the next one.

    Args:
        pipeline: whose.
        kind: of the DAG that has them.
        ds: the day, a template.
        first: before the first of them.
        last: after the last of them.
        depends_on_past: where training starts from the model of the day before, it waits for that day's training.
    """
    entries = pipeline.stages(kind)
    steps: list[list[BaseOperator]] = [] if first is None else [[first]]
    for has_lease, run in groupby(entries, key=lambda entry: entry.lease is not None):
        jobs = [_job(pipeline, entry, ds, depends_on_past) for entry in run]
        steps += [list(jobs)] if has_lease else [[job] for job in jobs]
    if kind == "score":
        for task in steps[-1]:
            task.on_success_callback = [day_done]
    if last is not None:
        steps.append([last])
    for upstream, downstream in pairwise(steps):
        for task in upstream:
            task >> downstream
    for step, following in zip(steps, steps[2:], strict=False):
        if isinstance(step[0], HeadraceGate):
            step[0] >> following
            step[0].refused_next = [task.task_id for task in following]


def _job(pipeline: Pipeline, entry: Any, ds: str, depends_on_past: bool) -> HeadraceJob:
    job = HeadraceGate if entry.name == "gate" else HeadraceJob
    warm = entry.name == "train" and depends_on_past and bool(pipeline.value("train.warm_start", True))
    return job(stage=entry.name, pipeline=pipeline, ds=ds, depends_on_past=warm)
