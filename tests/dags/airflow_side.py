"""Runs in Airflow's environment, started by test_dags.py: looks at the DAGs, or runs them; prints one line of JSON.

    python airflow_side.py look
    python airflow_side.py run [DAG_ID CONF_JSON]...

The caller sets AIRFLOW_HOME, the DAGs folder and the connection before: `import airflow` reads them.
"""

from __future__ import annotations

import json
import os
import sys
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
    found = bag()
    import headrace_wiring
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    class Event:
        def __init__(self, **extra: str) -> None:
            self.extra = extra

    events = {"a": [Event(ds="2026-01-09", pipeline="p"), Event(ds="2026-01-10", pipeline="q")], "b": [Event()]}
    dags = {}
    for dag_id, dag in found.dags.items():
        tasks = {
            t.task_id: {
                "submits": isinstance(t, SparkSubmitOperator),
                "application": t.application,
                "arguments": t.application_args,
                "downstream": sorted(t.downstream_task_ids),
                "outlets": [a.uri for a in t.outlets],
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
            "assets": [a.uri for a in getattr(dag.timetable.asset_condition, "objects", [])],
        }
    return {
        "errors": found.import_errors,
        "heavy": [m for m in HEAVY if m in sys.modules],
        "dags": dags,
        "newest_event": headrace_wiring.model_event(events),
        "no_event": headrace_wiring.model_event(None),
    }


def run(wanted: list[str]) -> dict[str, Any]:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    dags, outcomes = bag().dags, []
    for dag_id, conf in zip(wanted[::2], wanted[1::2], strict=True):
        asked = json.loads(conf)
        day = datetime.fromisoformat(asked.pop("logical_date", "2026-01-03T00:00:00+00:00"))
        for task in dags[dag_id].tasks:
            task.retries = 0  # a test that fails is not to wait for its second try
        done = dags[dag_id].test(logical_date=day, run_conf=asked)
        states = {t.task_id: str(t.state) for t in done.get_task_instances()}
        outcomes.append({"dag": dag_id, "state": str(done.state), "tasks": states})
    with create_session() as session:
        events = [dict(e.extra) for e in session.scalars(select(AssetEvent).order_by(AssetEvent.id))]
    return {"runs": outcomes, "events": events}


if __name__ == "__main__":
    # What the tasks print goes to standard error; the answer alone to standard output.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = look() if sys.argv[1] == "look" else run(sys.argv[2:])
    answer.write(json.dumps(result) + "\n")
    answer.close()
