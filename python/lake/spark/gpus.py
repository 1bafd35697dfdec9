"""The GPU that Spark assigned to a task: one process computes on it.

Imports no pyspark: logged models predict by it where their requirements alone are installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

#: As Spark names the resource.
GPU = "gpu"
_VISIBLE = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu_addresses() -> Sequence[str]:
    """Addresses of the GPUs that Spark assigned to the task that runs here; none: of no task, or it has none."""
    # A task of Spark's has imported it. Where logged models predict there need be none.
    spark = sys.modules.get("pyspark")
    context = None if spark is None else spark.TaskContext.get()
    resource = None if context is None else context.resources().get(GPU)
    return () if resource is None else resource.addresses


def show_assigned_gpu(addresses: Sequence[str]) -> None:
    """Let CUDA see the first GPU that Spark assigned to this process's task, and no other.

    Addresses are as Spark's discovery script lists them: numbers in the order of nvidia-smi, or UUIDs. Without any
    (`spark.task.resource.gpu.amount` is not set) the process sees what it saw.
    """
    if addresses:
        os.environ |= {**_VISIBLE, "CUDA_VISIBLE_DEVICES": addresses[0]}


def gpu_profile(spark: SparkSession) -> ResourceProfile | None:
    """Return the resources of a task that has a GPU to itself: all cores of its share of an executor, one process a
    GPU.

    None: the session's tasks have no GPUs (the profile `cpu`, or a local master, which knows no such resource).
    """
    conf = spark.sparkContext.getConf()
    amount = float(conf.get(f"spark.task.resource.{GPU}.amount") or 0)
    if not amount or (spark.sparkContext.master or "").startswith("local"):
        return None
    gpus = int(conf.get(f"spark.executor.resource.{GPU}.amount") or 1)
    cores = int(conf.get("spark.executor.cores") or 1)
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    task = TaskResourceRequests().cpus(max(1, cores // gpus)).resource(GPU, 1.0)
    return ResourceProfileBuilder().require(task).build
