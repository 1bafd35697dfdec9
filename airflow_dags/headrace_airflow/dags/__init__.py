"""A pipeline's DAGs, a module each."""

from __future__ import annotations

from airflow.sdk import DAG

from headrace_airflow.dags import backfill, maintain, retrain, score
from headrace_airflow.pipelines import Pipeline


def dags_of(pipeline: Pipeline) -> list[DAG]:
    """Those that it has: a faulty file the one that says so, a snapshot no maintenance of days to come."""
    if pipeline.fault is not None:
        return [retrain.faulty(pipeline)]
    return [kind.dag(pipeline) for kind in (retrain, score, backfill, maintain)]
