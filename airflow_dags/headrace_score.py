"""As soon as there is a new model: score users x items, publish to the warehouse, write the day's report."""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG
from headrace_wiring import DEFAULT_ARGS, MACROS, MODEL, HeadraceJob, params

with DAG(
    dag_id="headrace_score",
    description=__doc__,
    schedule=[MODEL],
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=8),
    default_args=DEFAULT_ARGS,
    params=params(),
    user_defined_macros=MACROS,
    tags=["headrace"],
):
    HeadraceJob(stage="score", hours=4) >> HeadraceJob(stage="publish") >> HeadraceJob(stage="report", hours=0.5)
