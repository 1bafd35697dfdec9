"""The DAGs of every pipeline: for each file of the folder of pipelines retrain, score, backfill and maintain.

A new pipeline needs no code here. Set-up: README.md.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pendulum
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import (
    DAG,
    BaseOperator,
    CronDataIntervalTimetable,
    Param,
    PartitionedAssetTimetable,
    get_parsing_context,
)
from headrace_airflow.notify import day_done, task_failed
from headrace_airflow.operators import (
    BackfillRange,
    Fault,
    HeadraceCommand,
    HeadraceGate,
    HeadraceJob,
    ModelEvent,
    NextDay,
    WaitForDay,
    model_asset,
)
from headrace_airflow.pipelines import Pipeline, pipelines
from headrace_airflow.settings import SETTINGS

#: The day of a run, one expression for all tasks: the one asked for, else the asset's partition, else the start of the
#: data interval, else (a run by hand has no interval) the day on which it was started.
DS = (
    "{{ params.ds or (partition_key | default(none)) or "
    "(((data_interval_start | default(none)) or dag_run.run_after) | ds) }}"
)

DEFAULT_ARGS: dict[str, Any] = {
    "owner": "headrace",
    # Of failures that another try may mend: what the user must mend fails at once, and waiting is no try
    # (`headrace_airflow.commands.end`).
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


_RETRAIN_HOURS = 20
_RETRAIN = "Every day: the day's data into the lake, a model trained on from yesterday's, and the verdict on it."


def retrain(pipeline: Pipeline) -> DAG:
    """Return the DAG of `complete`, the stages and `model_event`; without days in its source, only when asked."""
    with _empty_retrain(pipeline) as retrain_dag:
        complete = WaitForDay(pipeline=pipeline, ds=DS, timeout=timedelta(hours=_RETRAIN_HOURS - 2))
        event = ModelEvent(pipeline=pipeline, ds=DS)
        chain_stages(pipeline, "retrain", DS, complete, event, depends_on_past=pipeline.daily)
    return retrain_dag


def faulty(pipeline: Pipeline) -> DAG:
    """Return a DAG for a file whose stages are not known: its task fails each day with the reason."""
    with _empty_retrain(pipeline, str(pipeline.fault)) as retrain_dag:
        Fault(pipeline=pipeline, ds=DS)
    return retrain_dag


def _empty_retrain(pipeline: Pipeline, description: str = _RETRAIN) -> DAG:
    # Not "@daily", which has no data interval: the run that starts after midnight is for the day that has ended.
    cron = SETTINGS.schedule if pipeline.daily else None
    schedule = None if cron is None else CronDataIntervalTimetable(cron, timezone="UTC")
    return make_dag(pipeline, "retrain", description, _RETRAIN_HOURS, schedule=schedule)


_SCORE = (
    "For each event of the pipeline's model: score users x items, publish to the warehouse, write the day's report."
)


def score(pipeline: Pipeline) -> DAG:
    """Return the DAG of the scores; it runs once for each day that has had an event."""
    # It starts nothing by itself.
    with make_dag(
        pipeline,
        "score",
        _SCORE,
        8,
        schedule=PartitionedAssetTimetable(assets=model_asset(pipeline)),
        is_paused_upon_creation=False,
    ) as score_dag:
        chain_stages(pipeline, "score", DS)
    return score_dag


_BACKFILL = """Days of the past, oldest first: each is trained, judged, scored and published before the next one begins.

Start it by hand with the range {"first": ..., "last": ...}: a run for each day, which ends by starting the next one. A
day that fails is the last: cleared, it goes on from there.
"""
_BACKFILL_DAY = "{{ params.first }}"


def backfill(pipeline: Pipeline) -> DAG:
    """Return the DAG of `range`, the stages of the retraining and of the scores, and `next_day`."""
    days = {
        name: Param(None, type=["null", "string"], format="date", description=f"The {name} day, YYYY-MM-DD")
        for name in ("first", "last")
    }
    with make_dag(pipeline, "backfill", _BACKFILL, 24, params=days, is_paused_upon_creation=False) as backfill_dag:
        checked = BackfillRange(pipeline=pipeline, first=_BACKFILL_DAY, last="{{ params.last }}")
        trained = EmptyOperator(task_id="trained")
        chain_stages(pipeline, "retrain", _BACKFILL_DAY, checked, trained)
        chain_stages(pipeline, "score", _BACKFILL_DAY, trained, NextDay(pipeline=pipeline, dag_id=backfill_dag.dag_id))
    return backfill_dag


_MAINTAIN = "Every week: remove what the pipeline's retention says is old."


def maintain(pipeline: Pipeline) -> DAG:
    """Return the DAG that runs `headrace gc PIPELINE --delete`."""
    schedule = CronDataIntervalTimetable("0 6 * * 0", timezone="UTC")
    with make_dag(pipeline, "maintain", _MAINTAIN, 12, schedule=schedule) as maintain_dag:
        HeadraceCommand(task_id="gc", pipeline=pipeline, words=["gc", str(pipeline.path), "--delete"], ds=DS)
    return maintain_dag


_KINDS = {"retrain": retrain, "score": score, "backfill": backfill, "maintain": maintain}


def dags_of(pipeline: Pipeline, dag_id: str | None = None) -> list[DAG]:
    """Return a pipeline's DAGs; for a faulty file the one that names the fault.

    Args:
        pipeline: whose.
        dag_id: of the only DAG to return; None: all.
    """
    kinds = _KINDS if pipeline.fault is None else {"retrain": faulty}
    return [make(pipeline) for kind, make in kinds.items() if dag_id in (None, pipeline.dag_id(kind))]


def dags_of_folder(folder: Path | None = None) -> dict[str, DAG]:
    """Return the DAGs of all pipelines of a folder, by their ids. The process of a task reads the file for one DAG.

    Args:
        folder: of the pipelines' files; None: that of the settings.
    """
    dag_id = get_parsing_context().dag_id
    pipelines_of_folder = pipelines(folder, with_specs=dag_id is None)
    return {dag.dag_id: dag for pipeline in pipelines_of_folder for dag in dags_of(pipeline, dag_id)}


# By this name another file imports it, which has a folder of its own (`headrace new`). Airflow gives its files others.
if __name__ != "headrace_dags":
    globals().update(dags_of_folder())
