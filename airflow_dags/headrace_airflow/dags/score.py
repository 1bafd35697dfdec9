"""For each event of the pipeline's model: score users x items, publish to the warehouse, write the day's report."""

from __future__ import annotations

from airflow.sdk import DAG, PartitionedAssetTimetable

from headrace_airflow.dags.common import DS, chain_stages, make_dag
from headrace_airflow.operators import model_asset
from headrace_airflow.pipelines import Pipeline


def dag(pipeline: Pipeline) -> DAG:
    """Return the DAG of the scores; it runs once for each day that has had an event."""
    # It starts nothing by itself.
    with make_dag(
        pipeline,
        "score",
        __doc__ or "",
        8,
        schedule=PartitionedAssetTimetable(assets=model_asset(pipeline)),
        is_paused_upon_creation=False,
    ) as score_dag:
        chain_stages(pipeline, "score", DS)
    return score_dag
