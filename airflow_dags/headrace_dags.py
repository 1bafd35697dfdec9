"""The DAGs of every pipeline: for each file of the folder of pipelines retrain, score, backfill and maintain.

A new pipeline needs no code here. What each DAG is: headrace_airflow/dags/; set-up: README.md.
"""

from __future__ import annotations

from airflow.sdk import get_parsing_context
from headrace_airflow.dags import dags_of
from headrace_airflow.pipelines import pipelines

# The process of a task reads this file for one DAG.
_dag_id = get_parsing_context().dag_id
# Airflow looks for this word in a file before it reads it: dag.
for _pipeline in pipelines(with_specs=_dag_id is None):
    for _dag in dags_of(_pipeline, _dag_id):
        globals()[_dag.dag_id] = _dag
