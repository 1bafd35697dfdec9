"""Parents of the jobs' runs: the task's and its DAG run's, as OpenLineage names the parents of started programs.

Where Airflow's provider for OpenLineage is installed, by the ids that it sends its own events with.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

if TYPE_CHECKING:
    from airflow.sdk import Context


def parent_variables(context: Context) -> dict[str, str]:
    """Return variables for what a task starts: `namespace/job/run id` of the task's try, and of the DAG's run."""
    task: Any = context["ti"]
    try:
        # Late: without the provider nothing else of this is needed.
        from airflow.providers.openlineage.plugins.macros import lineage_parent_id, lineage_root_parent_id
    except ImportError:
        parent, root = _ids(task)
    else:
        parent, root = lineage_parent_id(task), lineage_root_parent_id(task)
    return {"OPENLINEAGE_PARENT_ID": parent, "OPENLINEAGE_ROOT_PARENT_ID": root}


def _ids(task: Any) -> tuple[str, str]:
    """Return ids that are the same whenever a try is asked, as after its deferral; the provider names jobs in the same
    way.
    """
    namespace = os.environ.get("AIRFLOW__OPENLINEAGE__NAMESPACE") or os.environ.get("OPENLINEAGE_NAMESPACE", "default")
    dag, run = task.dag_id, f"{task.dag_id}/{task.run_id}"
    attempt = uuid5(NAMESPACE_URL, f"airflow:{run}/{task.task_id}/{task.map_index}/{task.try_number}")
    return f"{namespace}/{dag}.{task.task_id}/{attempt}", f"{namespace}/{dag}/{uuid5(NAMESPACE_URL, f'airflow:{run}')}"
