"""For a day that was trained: score users x items, publish to the warehouse, write the day's report."""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG, chain
from headrace_wiring import DEFAULT_ARGS, jobs, params

with DAG(
    dag_id="headrace_score",
    description=__doc__,
    # Started by headrace_retrain, once for each pipeline and day, or by hand.
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    # It starts nothing by itself, and headrace_retrain waits for it.
    is_paused_upon_creation=False,
    dagrun_timeout=timedelta(hours=8),
    default_args=DEFAULT_ARGS,
    params=params(),
    tags=["headrace"],
):
    chain(*jobs("headrace_score"))
