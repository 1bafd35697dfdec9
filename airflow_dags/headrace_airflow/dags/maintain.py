"""Every week: remove what the pipeline's retention says is old."""

from __future__ import annotations

from airflow.sdk import DAG, CronDataIntervalTimetable

from headrace_airflow.dags.common import DS, make_dag
from headrace_airflow.operators import HeadraceCommand
from headrace_airflow.pipelines import Pipeline


def dag(pipeline: Pipeline) -> DAG:
    """Return the DAG that runs `headrace gc PIPELINE --delete`."""
    schedule = CronDataIntervalTimetable("0 6 * * 0", timezone="UTC")
    with make_dag(pipeline, "maintain", __doc__ or "", 12, schedule=schedule) as maintain_dag:
        HeadraceCommand(task_id="gc", pipeline=pipeline, words=["gc", str(pipeline.path), "--delete"], ds=DS)
    return maintain_dag
