"""Airflow's provider for Spark, without the client of Kubernetes, which it would import wherever that is installed.

That takes two seconds of each process that reads a DAG file, where most jobs need none.
"""

from __future__ import annotations

import sys

_CLIENT = "airflow.providers.cncf.kubernetes.kube_client"

_hidden = _CLIENT not in sys.modules
if _hidden:
    sys.modules[_CLIENT] = None  # type: ignore[assignment]  # an import of it fails, which the provider allows for
try:
    from airflow.providers.apache.spark.hooks import spark_submit
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
finally:
    if _hidden:
        del sys.modules[_CLIENT]

SparkSubmitHook = spark_submit.SparkSubmitHook

__all__ = ["SparkSubmitHook", "SparkSubmitOperator", "with_kubernetes"]


def with_kubernetes() -> None:
    """Give the hook the client: it asks for it where the master is Kubernetes'."""
    from airflow.providers.cncf.kubernetes import kube_client

    spark_submit.kube_client = kube_client
