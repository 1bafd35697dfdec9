"""Runs in Airflow's environment, started by test_dags.py: looks at the DAGs, or runs them; prints one line of JSON.

    python airflow_side.py look
    python airflow_side.py run [DAG_ID DS]...

The caller sets AIRFLOW_HOME, the DAGs folder and the connection before: `import airflow` reads them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

HEAVY = ("pyspark", "torch", "headrace", "numpy", "pandas", "pyarrow", "horovod", "xgboost", "mlflow")


def bag() -> Any:
    """The DAGs as Airflow's own processes read them."""
    from airflow.dag_processing.dagbag import BundleDagBag

    folder = Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    return BundleDagBag(folder, bundle_path=folder, bundle_name="dags-folder")


def look() -> dict[str, Any]:
    """The DAGs, and what reading them has done: files opened, processes and connections begun."""
    opened: Counter[str] = Counter()
    begun: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".yaml"):
            opened[str(args[0])] += 1
        elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect"):
            begun.append(event)

    # What Airflow itself does when it is imported is not looked at.
    import airflow.dag_processing.dagbag  # noqa: F401
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    sys.addaudithook(watch)
    found = bag()
    audited = {"opened": dict(opened), "begun": list(begun)}
    dags = {}
    for dag_id, dag in found.dags.items():
        tasks = {
            t.task_id: {
                "submits": isinstance(t, SparkSubmitOperator),
                "application": getattr(t, "application", None),
                "downstream": sorted(t.downstream_task_ids),
                "retries": t.retries,
                "pool": t.pool,
                "depends_on_past": t.depends_on_past,
                "trigger_rule": getattr(t.trigger_rule, "value", t.trigger_rule),
                "timeout": t.execution_timeout is not None and t.execution_timeout.total_seconds(),
                "words": getattr(t, "words", None),
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
    heavy = [m for m in HEAVY if m in sys.modules]
    return {"errors": found.import_errors, "heavy": heavy, "dags": dags, **audited}


def run(wanted: list[str]) -> dict[str, Any]:
    """Each DAG for a day, one after another in this process."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import sync_bag_to_db
    from airflow.utils.session import create_session

    found, outcomes = bag(), []
    DagBundlesManager().sync_bundles_to_db()
    with create_session() as session:  # assets are known by the database
        sync_bag_to_db(found, "dags-folder", None, session=session)
    for dag_id, ds in zip(wanted[::2], wanted[1::2], strict=True):
        dag = found.dags[dag_id]
        for task in dag.tasks:
            task.retries = 0
        done = dag.test(logical_date=datetime.fromisoformat(f"{ds}T00:00:00+00:00"), run_conf={"ds": ds})
        states = {t.task_id: str(t.state) for t in done.get_task_instances()}
        outcomes.append({"dag": dag_id, "state": str(done.state), "tasks": states})
    return {"runs": outcomes}


if __name__ == "__main__":
    # What the tasks print goes to standard error; the answer alone to standard output.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = look() if sys.argv[1] == "look" else run(sys.argv[2:])
    answer.write(json.dumps(result) + "\n")
    answer.close()
