"""Every day: the day's landing files into the lake, features, and a model trained on from yesterday's."""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG, CronDataIntervalTimetable
from headrace_wiring import DEFAULT_ARGS, MACROS, MODEL, HeadraceJob, params

with DAG(
    dag_id="headrace_retrain",
    description=__doc__,
    # Not "@daily", which has no data interval: the run that starts after midnight is for the day that has ended.
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=12),
    default_args=DEFAULT_ARGS,
    params=params(),
    user_defined_macros=MACROS,
    tags=["headrace"],
):
    # One after another: a pipeline has one writer at a time. The baseline comes before the model because the model's
    # task is what tells the scoring DAG to start, and scoring may take the better of the two (`score.model: best`).
    (
        HeadraceJob(stage="ingest")
        >> HeadraceJob(stage="features")
        >> HeadraceJob(stage="drift", hours=0.5)
        >> HeadraceJob(stage="baseline")
        >> HeadraceJob(stage="train", hours=6, outlets=[MODEL])
    )
