"""A Spark task of Horovod's ends when its rank has ended.

Horovod 0.28 lets a task live for 3 s at least, so that who started the rank there can ask for its exit code; but it
counts them from the rank's end, and each launch ends 3 s late. Here they are counted from the rank's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: What a Spark task runs: its number and its rows, to its results.
Mapper = Callable[[int, Any], Iterator[Any]]


def counting_from_start(mapper: Mapper) -> Mapper:
    """A mapper of Horovod's, in a task that counts its least lifetime from the start of its rank."""

    def mapped(index: int, rows: Any) -> Iterator[Any]:
        count_from_start()
        yield from mapper(index, rows)

    return mapped


def count_from_start() -> None:
    """For this process: Horovod's task services count from the start of their commands."""
    from horovod.runner.common.service.task_service import BasicTaskService
    from horovod.runner.common.util.timeout import Timeout
    from horovod.spark.task.task_service import SparkTaskService

    def run_command(service: Any, *args: Any, **more: Any) -> None:
        seconds = service._minimum_command_lifetime_s
        if seconds is not None:
            service._minimum_command_lifetime = Timeout(seconds, message="the least lifetime of a task")
        BasicTaskService._run_command(service, *args, **more)

    SparkTaskService._run_command = run_command
