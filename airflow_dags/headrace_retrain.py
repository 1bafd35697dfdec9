"""Every day: the day's landing files into the lake, features, a model trained on from yesterday's; then its scores."""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG, CronDataIntervalTimetable, chain
from headrace_wiring import DEFAULT_ARGS, jobs, params, score_this_day

with DAG(
    dag_id="headrace_retrain",
    description=__doc__,
    # Not "@daily", which has no data interval: the run that starts after midnight is for the day that has ended.
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=20),
    default_args=DEFAULT_ARGS,
    params=params(),
    tags=["headrace"],
):
    chain(*jobs("headrace_retrain"), score_this_day())
