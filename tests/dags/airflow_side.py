"""Runs in Airflow's environment, started by test_dags.py: looks at the DAGs, or runs them; prints one line of JSON.

    python airflow_side.py look
    python airflow_side.py run [DAG_ID CONF_JSON]...

The caller sets AIRFLOW_HOME, the DAGs folder and the connection before: `import airflow` reads them.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

HEAVY = ("pyspark", "torch", "headrace", "numpy", "pandas", "pyarrow", "horovod", "xgboost", "mlflow")


def bag() -> Any:
    """The DAGs as Airflow's own processes read them."""
    from airflow.dag_processing.dagbag import BundleDagBag

    folder = Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    return BundleDagBag(folder, bundle_path=folder, bundle_name="dags-folder")


def look() -> dict[str, Any]:
    found = bag()
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    dags = {}
    for dag_id, dag in found.dags.items():
        tasks = {
            t.task_id: {
                "submits": isinstance(t, SparkSubmitOperator),
                "application": getattr(t, "application", None),
                "triggers": getattr(t, "trigger_dag_id", None),
                "downstream": sorted(t.downstream_task_ids),
                "retries": t.retries,
                "trigger_rule": getattr(t.trigger_rule, "value", t.trigger_rule),
                "timeout": t.execution_timeout is not None and t.execution_timeout.total_seconds(),
            }
            for t in dag.tasks
        }
        dags[dag_id] = {
            "tasks": tasks,
            "timetable": type(dag.timetable).__name__,
            "catchup": dag.catchup,
            "max_active_runs": dag.max_active_runs,
            "params": sorted(dag.params),
            "timeout": dag.dagrun_timeout is not None,
        }
    return {"errors": found.import_errors, "heavy": [m for m in HEAVY if m in sys.modules], "dags": dags}


def run(wanted: list[str]) -> dict[str, Any]:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import sync_bag_to_db
    from airflow.models.dagrun import DagRun
    from airflow.sdk.exceptions import ParamValidationError
    from airflow.utils.session import create_session
    from sqlalchemy import select

    found, outcomes = bag(), []
    dags = found.dags
    DagBundlesManager().sync_bundles_to_db()
    with create_session() as session:  # a run is triggered by name: the database must know it
        sync_bag_to_db(found, "dags-folder", None, session=session)
    declared = {(dag_id, task.task_id): task.retries for dag_id, dag in dags.items() for task in dag.tasks}
    for dag_id, conf in zip(wanted[::2], wanted[1::2], strict=True):
        asked = json.loads(conf)
        day = datetime.fromisoformat(asked.pop("logical_date", "2026-01-03T00:00:00+00:00"))
        again = asked.pop("retries", False)
        for task in dags[dag_id].tasks:
            # A test is not to wait for a second try, unless it is about that, nor for the run that a task triggers.
            task.retries, task.retry_delay = declared[dag_id, task.task_id] if again else 0, timedelta(0)
            task.wait_for_completion = False
        try:
            done = dags[dag_id].test(logical_date=day, run_conf=asked)
        except ParamValidationError as e:
            print(e, file=sys.stderr)
            outcomes.append({"dag": dag_id, "state": "refused", "tasks": {}})
            continue
        states = {t.task_id: str(t.state) for t in done.get_task_instances()}
        outcomes.append({"dag": dag_id, "state": str(done.state), "tasks": states})
    with create_session() as session:
        queued = session.scalars(select(DagRun).where(DagRun.state == "queued").order_by(DagRun.id))
        triggered = [{"dag": r.dag_id, "run": r.run_id, "conf": dict(r.conf or {})} for r in queued]
    return {"runs": outcomes, "triggered": triggered}


if __name__ == "__main__":
    # What the tasks print goes to standard error; the answer alone to standard output.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = look() if sys.argv[1] == "look" else run(sys.argv[2:])
    answer.write(json.dumps(result) + "\n")
    answer.close()
