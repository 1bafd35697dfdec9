"""A pipeline's DAGs, a module each."""

from __future__ import annotations

from airflow.sdk import DAG

from headrace_airflow.dags import backfill, maintain, retrain, score
from headrace_airflow.pipelines import Pipeline

_KINDS = {"retrain": retrain.dag, "score": score.dag, "backfill": backfill.dag, "maintain": maintain.dag}


def dags_of(pipeline: Pipeline, dag_id: str | None = None) -> list[DAG]:
    """Return a pipeline's DAGs; for a faulty file the one that names the fault.

    Args:
        pipeline: whose.
        dag_id: of the only DAG to return; None: all.
    """
    kinds = _KINDS if pipeline.fault is None else {"retrain": retrain.faulty}
    return [make(pipeline) for kind, make in kinds.items() if dag_id in (None, pipeline.dag_id(kind))]
