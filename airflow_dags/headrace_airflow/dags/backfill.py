"""Days of the past, oldest first: each is trained, judged, scored and published before the next one begins.

Start it by hand with the range {"first": ..., "last": ...}: a run for each day, which ends by starting the next one. A
day that fails is the last: cleared, it goes on from there.
"""

from __future__ import annotations

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param

from headrace_airflow.dags.common import chain_stages, make_dag
from headrace_airflow.operators import BackfillRange, NextDay
from headrace_airflow.pipelines import Pipeline

_DAY = "{{ params.first }}"


def dag(pipeline: Pipeline) -> DAG:
    """Return the DAG of `range`, the stages of the retraining and of the scores, and `next_day`."""
    days = {
        name: Param(None, type=["null", "string"], format="date", description=f"The {name} day, YYYY-MM-DD")
        for name in ("first", "last")
    }
    with make_dag(pipeline, "backfill", __doc__ or "", 24, params=days, is_paused_upon_creation=False) as backfill_dag:
        checked = BackfillRange(pipeline=pipeline, first=_DAY, last="{{ params.last }}")
        trained = EmptyOperator(task_id="trained")
        chain_stages(pipeline, "retrain", _DAY, checked, trained)
        chain_stages(pipeline, "score", _DAY, trained, NextDay(pipeline=pipeline, dag_id=backfill_dag.dag_id))
    return backfill_dag
