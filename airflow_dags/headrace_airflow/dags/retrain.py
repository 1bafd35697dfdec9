"""Every day: the day's data into the lake, a model trained on from yesterday's, and the verdict on it."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, CronDataIntervalTimetable

from headrace_airflow.dags.common import DS, chain_stages, make_dag
from headrace_airflow.operators import Fault, ModelEvent, WaitForDay
from headrace_airflow.pipelines import Pipeline
from headrace_airflow.settings import SETTINGS

_HOURS = 20


def dag(pipeline: Pipeline) -> DAG:
    """Return the DAG of `complete`, the stages and `model_event`; without days in its source, only when asked."""
    with _empty(pipeline) as retrain_dag:
        complete = WaitForDay(pipeline=pipeline, ds=DS, timeout=timedelta(hours=_HOURS - 2))
        event = ModelEvent(pipeline=pipeline, ds=DS)
        chain_stages(pipeline, "retrain", DS, complete, event, depends_on_past=pipeline.daily)
    return retrain_dag


def faulty(pipeline: Pipeline) -> DAG:
    """Return a DAG for a file whose stages are not known: its task fails each day with the reason."""
    with _empty(pipeline, str(pipeline.fault)) as retrain_dag:
        Fault(pipeline=pipeline, ds=DS)
    return retrain_dag


def _empty(pipeline: Pipeline, description: str = __doc__ or "") -> DAG:
    # Not "@daily", which has no data interval: the run that starts after midnight is for the day that has ended.
    cron = SETTINGS.schedule if pipeline.daily else None
    schedule = None if cron is None else CronDataIntervalTimetable(cron, timezone="UTC")
    return make_dag(pipeline, "retrain", description, _HOURS, schedule=schedule)
