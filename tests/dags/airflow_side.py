"""Runs in Airflow's environment, started by test_dags.py: looks at the DAGs, or runs them; prints one line of JSON.

    python airflow_side.py look
    python airflow_side.py run [DAG_ID DS]...
    python airflow_side.py pods PIPELINE STAGE...
    python airflow_side.py jobs PIPELINE PROGRAM [STAGE DS]...
    python airflow_side.py wait RESOURCE_MANAGER APPLICATION

The caller sets AIRFLOW_HOME, the DAGs folder and the connection before: `import airflow` reads them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

HEAVY = ("pyspark", "torch", "headrace", "numpy", "pandas", "pyarrow", "horovod", "xgboost", "mlflow", "kubernetes")


def bag() -> Any:
    """The DAGs as Airflow's own processes read them."""
    from airflow.dag_processing.dagbag import BundleDagBag

    folder = Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    return BundleDagBag(folder, bundle_path=folder, bundle_name="dags-folder")


def look() -> dict[str, Any]:
    """The DAGs, and what reading them has done: files opened, processes and connections begun.

    And those that the process of a task of one of them reads.
    """
    opened: Counter[str] = Counter()
    started: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".yaml"):
            opened[str(args[0])] += 1
        elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect"):
            started.append(event)

    # What Airflow itself does when it is imported is not looked at.
    import airflow.dag_processing.dagbag  # noqa: F401

    sys.addaudithook(watch)
    dag_bag = bag()
    audited = {"opened": dict(opened), "begun": list(started)}
    heavy = [m for m in HEAVY if m in sys.modules]
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    dags = {}
    for dag_id, dag in dag_bag.dags.items():
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
            "fault": next((str(t.pipeline.fault) for t in dag.tasks if t.task_id == "pipeline_file"), None),
            "timetable": type(dag.timetable).__name__,
            "catchup": dag.catchup,
            "max_active_runs": dag.max_active_runs,
            "params": sorted(dag.params),
            "timeout": dag.dagrun_timeout is not None,
        }
    from airflow.sdk.definitions._internal.dag_parsing_context import _airflow_parsing_context_manager

    last_dag_id = max(dags)
    with _airflow_parsing_context_manager(dag_id=last_dag_id):
        of_task = list(bag().dags)
    return {"errors": dag_bag.import_errors, "heavy": heavy, "dags": dags, "of_task": (last_dag_id, of_task), **audited}


def run(dag_runs: list[str]) -> dict[str, Any]:
    """Each DAG for a day, one after another in this process."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import sync_bag_to_db
    from airflow.utils.session import create_session

    dag_bag, outcomes = bag(), []
    DagBundlesManager().sync_bundles_to_db()
    with create_session() as session:  # assets are known by the database
        sync_bag_to_db(dag_bag, "dags-folder", None, session=session)
    for dag_id, ds in zip(dag_runs[::2], dag_runs[1::2], strict=True):
        dag = dag_bag.dags[dag_id]
        for task in dag.tasks:
            task.retries = 0
        dag_run = dag.test(logical_date=datetime.fromisoformat(f"{ds}T00:00:00+00:00"), run_conf={"ds": ds})
        states = {t.task_id: str(t.state) for t in dag_run.get_task_instances()}
        outcomes.append({"dag": dag_id, "state": str(dag_run.state), "tasks": states})
    return {"runs": outcomes}


def pods(name: str, stages: list[str]) -> dict[str, Any]:
    """The pods of a pipeline's stages as the API server would be sent them, by the models of Kubernetes' client."""
    sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    from headrace_airflow.commands import RemoteCommand
    from headrace_airflow.connections import master
    from headrace_airflow.operators import HeadraceJob
    from headrace_airflow.pipelines import pipelines
    from kubernetes.client import ApiClient

    pipeline = next(p for p in pipelines() if p.name == name)
    place, pod_objects = master(pipeline), {}
    for stage in stages:
        job = HeadraceJob(stage=stage, pipeline=pipeline, ds="2026-02-01")
        pod = RemoteCommand._pod(job, place, job._words(place), job.execution_timeout)
        pod_objects[stage] = ApiClient().sanitize_for_serialization(pod.build_pod_request_obj(dry_run=True))
    return {"pods": pod_objects}


class _Try:
    """Fields of a task instance that name the lineage of what it starts."""

    dag_id, run_id, task_id, map_index, try_number = "dag", "run", "task", -1, 1
    logical_date = None
    stats_tags: Mapping[str, str] = MappingProxyType({})


def jobs(name: str, program: str, arguments: list[str]) -> dict[str, Any]:
    """Stages of a pipeline as tasks, all at once: until each is deferred, what its trigger fires, how it then ends.

    The jobs are those of the DAGs; what they submit is a program of the caller's, in place of the stages' own.
    """
    import asyncio
    import logging
    from concurrent.futures import ThreadPoolExecutor

    sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    from airflow.sdk.exceptions import TaskDeferred
    from headrace_airflow.operators import HeadraceJob
    from headrace_airflow.pipelines import pipelines

    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    pipeline = next(p for p in pipelines() if p.name == name)

    def see_through(stage: str, ds: str) -> dict[str, Any]:
        job = HeadraceJob(stage=stage, pipeline=pipeline, ds=ds)
        job.application = program
        context: Any = {"ti": _Try()}
        event = None
        try:
            try:
                job.execute(context)
            except TaskDeferred as deferred:
                print(f"{ds} deferred {deferred.trigger.serialize()[1]['application']}", flush=True)
                event = asyncio.run(anext(aiter(deferred.trigger.run()))).payload
                getattr(job, deferred.method_name)(context, event)
        except Exception as e:  # what the task ends with is what is asked for
            return {"event": event, "ends": type(e).__name__, "says": str(e)}
        return {"event": event, "ends": None}

    with ThreadPoolExecutor() as threads:
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        futures = {ds: threads.submit(see_through, stage, ds) for stage, ds in pairs}
        return {"jobs": {ds: future.result() for ds, future in futures.items()}}


def wait(rest: str, application: str) -> dict[str, Any]:
    """Return the event that the trigger of a YARN application fires."""
    import asyncio

    sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    from headrace_airflow.commands import ApplicationEnded

    trigger = ApplicationEnded("yarn", rest, "", application, 0.02)
    return {"event": asyncio.run(anext(aiter(trigger.run()))).payload}


if __name__ == "__main__":
    # What the tasks print goes to standard error; the answer alone to standard output.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    verb, words = sys.argv[1], sys.argv[2:]
    match verb:
        case "look":
            result = look()
        case "run":
            result = run(words)
        case "pods":
            result = pods(words[0], words[1:])
        case "jobs":
            result = jobs(words[0], words[1], words[2:])
        case "wait":
            result = wait(*words)
        case _:
            raise SystemExit(__doc__)
    answer.write(json.dumps(result) + "\n")
    answer.close()
