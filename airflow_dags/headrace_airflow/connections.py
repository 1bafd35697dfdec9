"""Airflow's connections, as inputs of jobs and commands of the pipelines' environment: Spark's master, and secrets.

Secrets go into the environment of the one process that is started: no argument, no template and no log line has them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk.bases.hook import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from headrace_airflow.pipelines import Pipeline
from headrace_airflow.settings import SETTINGS, private_variables

SPARK = "spark_default"
WAREHOUSE = "headrace_warehouse"
STORE = "headrace_store"
#: The longest that a short command may take.
_SECONDS = 300
#: Of `secrets`, what is none, and may stand in a property.
PUBLIC = ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


def connection(conn_id: str) -> Any:
    """Return Airflow's connection of that name, or None."""
    try:
        return BaseHook.get_connection(conn_id)
    except (AirflowException, ValueError):
        return None


@dataclass(frozen=True)
class Master:
    """Spark's master, by the connection `spark_default`: where stages run.

    By `kind`: `local`: an application of this machine, whose driver is a process of the task (spark-submit; the master
    may be a cluster's). `standalone`, `yarn`: drivers on a cluster. `kubernetes`: a pod each.
    """

    kind: str
    conn_id: str
    url: str
    #: Of the REST API that knows a submitted driver (standalone) or application (YARN).
    rest: str = ""
    #: Of the pages of a standalone master.
    web: str = ""
    #: Of Kubernetes: Spark properties for the pods of all pipelines, and Airflow's connection of the API server.
    conf: Mapping[str, str] = field(default_factory=dict)
    kubernetes: str = ""

    @property
    def is_remote(self) -> bool:
        """Return whether commands of `headrace` run where the stages do: this machine need not reach the workspace."""
        return self.kind in ("standalone", "kubernetes")

    @property
    def overrides(self) -> list[str]:
        """Return the overrides that tell an application where it runs: its set-up depends on that."""
        return [] if self.kind == "kubernetes" else ["--set", f"spark.master={self.url}"]


def master(pipeline: Pipeline) -> Master:
    """Return the master of a pipeline's own connection, else of the common one. A missing one would silently mean
    `yarn`.

    Raises:
        AirflowFailException: it is missing, has no host, or what it needs besides is not there.
    """
    conn_id = f"{SPARK}_{pipeline.name}"
    conn = connection(conn_id)
    if conn is None:
        conn_id = SPARK
        conn = connection(conn_id)
    advice = (
        f"define the connection '{conn_id}' as JSON, for example "
        f"""AIRFLOW_CONN_{conn_id.upper()}='{{"conn_type":"spark","host":"local[2]"}}'"""
    )
    if conn is None:
        raise AirflowFailException(advice)
    if not conn.host:
        raise AirflowFailException(f"the connection '{conn_id}' has no host (Spark's master): {advice}")
    url = f"{conn.host}:{conn.port}" if conn.port else str(conn.host)
    extra = conn.extra_dejson
    cluster = extra.get("deploy-mode") == "cluster"
    if url == "k8s" or (cluster and url.startswith("k8s")):
        if url != "k8s" or not cluster:
            raise AirflowFailException(
                f"the connection '{conn_id}' has the host {url}: for pods of Kubernetes write the host k8s and "
                f'"deploy-mode": "cluster"; the API server is that of the connection kubernetes_default (or the '
                f'one that "kubernetes_conn_id" of the extra names)'
            )
        conf = {str(key): str(value) for key, value in (extra.get("conf") or {}).items()}
        place = str(extra.get("kubernetes_conn_id") or "kubernetes_default")
        return Master("kubernetes", conn_id, url, conf=conf, kubernetes=place)
    if not cluster:
        return Master("local", conn_id, url)
    if url == "yarn":
        # The keys are those of Airflow's Spark provider.
        rest = str(extra.get("yarn_resourcemanager_webapp_address") or "")
        if not rest:
            raise AirflowFailException(
                f"the connection '{conn_id}' has deploy-mode cluster on YARN: give the ResourceManager in its extra, "
                f'"yarn_resourcemanager_webapp_address": "http://HOST:8088"'
            )
        return Master("yarn", conn_id, url, rest.rstrip("/"))
    host = url.removeprefix("spark://").rpartition(":")[0]
    begin = f"{extra.get('rest-scheme', 'http')}://{host}"
    rest, web = (f"{begin}:{extra.get(key, port)}" for key, port in (("rest-port", 6066), ("webui-port", 8080)))
    return Master("standalone", conn_id, url, rest, web)


def secrets(pipeline: Pipeline) -> dict[str, str]:
    """Return the variables for the jobs of a pipeline, from the connections of the warehouse and of the store.

    Raises:
        AirflowFailException: the pipeline's own connection has a password, and its YAML names no variable for it.
    """
    variables: dict[str, str] = {}
    pipeline_warehouse = connection(f"{WAREHOUSE}_{pipeline.name}")
    variable = pipeline.value("publish.warehouse.password_env")
    if pipeline_warehouse is not None and pipeline_warehouse.password and variable is None:
        raise AirflowFailException(
            f"{pipeline.path}: the connection '{WAREHOUSE}_{pipeline.name}' has a password: name the variable that "
            f"jobs read it from, publish.warehouse.password_env"
        )
    warehouse = pipeline_warehouse or connection(WAREHOUSE)
    if warehouse is not None and warehouse.password and variable is not None:
        variables[variable] = warehouse.password
    store = connection(f"{STORE}_{pipeline.name}") or connection(STORE)
    if store is not None:
        extra = store.extra_dejson
        credentials = {
            "AWS_ACCESS_KEY_ID": store.login,
            "AWS_SECRET_ACCESS_KEY": store.password,
            "AWS_SESSION_TOKEN": extra.get("aws_session_token"),
            "AWS_DEFAULT_REGION": extra.get("region_name"),
            "AWS_ENDPOINT_URL": extra.get("endpoint_url"),
        }
        variables |= {name: str(value) for name, value in credentials.items() if value}
    return variables


def environment(pipeline: Pipeline | None = None) -> dict[str, str]:
    """Return the environment of a command of the pipelines' environment, with the secrets of its pipeline."""
    private = {*private_variables(), "PYTHONPATH"}
    inherited = {name: value for name, value in os.environ.items() if name not in private}
    return inherited | {"PYTHONUNBUFFERED": "1"} | (secrets(pipeline) if pipeline is not None else {})


def command(*words: str) -> list[str]:
    """Return the words of `headrace WORDS... --home HOME`."""
    return [str(SETTINGS.headrace), *words, "--home", SETTINGS.home]


def run(argv: list[str], pipeline: Pipeline) -> subprocess.CompletedProcess[str]:
    """Run a short command of the pipelines' environment.

    Raises:
        AirflowFailException: it cannot be started.
    """
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, env=environment(pipeline), timeout=_SECONDS
        )
    except OSError as e:
        raise AirflowFailException(
            f"cannot run {argv[0]} ({e.strerror}): set HEADRACE_PYTHON, or run `make env`"
        ) from e
