"""Hosts of ranks: task slots of a Spark cluster, addresses of services, lost hosts, and the end of ranks' tasks."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from types import ModuleType
from typing import Any

import horovod.runner.common.util.network
from pyspark.sql import SparkSession

from headrace.errors import UserError

log = logging.getLogger("headrace.train")
_POLL_SECONDS = 0.5
#: Seconds before the first message about waiting, and between further ones.
_PATIENCE_SECONDS = 5.0
_EVERY_SECONDS = 15.0


def count_slots(spark: SparkSession) -> int:
    """Return the number of tasks that the present executors can run at once, by cores and GPUs.

    It is Spark's own count, by which it checks a barrier stage. PySpark's two counts are set by the user
    (`defaultParallelism`), or ignore GPUs.
    """
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


class Slots:
    """Task slots that a launch waits for."""

    def __init__(self, required: int, seconds: float) -> None:
        self.required, self.seconds = required, seconds
        self.available = 0

    def check(self, master: str) -> None:
        """Explain a start that took too long.

        Raises:
            UserError: there were never enough slots.
        """
        if self.available < self.required:
            raise UserError(
                f"train.ranks is {self.required}, but after {self.seconds:g} s (train.start_seconds) Spark ({master}) "
                f"has {self.available} task slots for them, and all ranks run at once: ask for more executors or cores "
                f"(spark.executor.instances, spark.executor.cores, spark.cores.max; with GPUs a task's share of one), "
                f"lower train.ranks, or wait longer"
            )


@contextmanager
def watch_slots(
    count: Callable[[], int], required: int, seconds: float, started: Callable[[], bool]
) -> Iterator[Slots]:
    """Count slots in a thread during the block, and log messages while there are too few.

    Args:
        count: returns the current number of slots.
        required: required number: one for each rank.
        seconds: time that the launch waits, for the messages.
        started: returns whether the ranks run, so that the launch does not wait any more.
    """
    slots, end = Slots(required, seconds), threading.Event()

    def run() -> None:
        start, reported = time.monotonic(), 0.0
        while not started():
            slots.available = max(slots.available, count())
            waited = time.monotonic() - start
            if slots.available >= required:
                if reported:
                    log.info("%d task slots are there after %.0f s", slots.available, waited)
                return
            if waited >= (reported + _EVERY_SECONDS if reported else _PATIENCE_SECONDS):
                reported = waited
                log.info(
                    "waiting for task slots: %d of %d after %.0f s, at most %.0f s (train.start_seconds)",
                    slots.available,
                    required,
                    waited,
                    seconds,
                )
            if end.wait(_POLL_SECONDS):
                return

    thread = threading.Thread(target=run, name="slots", daemon=True)
    thread.start()
    try:
        yield slots
    finally:
        end.set()
        thread.join()


#: Addresses of each interface, with the service's port.
Addresses = dict[str, list[tuple[str, int]]]


@contextmanager
def without_loopback() -> Iterator[None]:
    """Make services that this process starts in the block report no loopback address."""
    from horovod.runner.common.util.network import BasicService

    original = BasicService._get_local_addresses
    BasicService._get_local_addresses = lambda service: beyond_loopback(original(service))
    try:
        yield
    finally:
        BasicService._get_local_addresses = original


def reached_by_others(mapper: Mapper) -> Mapper:
    """Wrap a mapper of Horovod, so that its task's service reports no loopback address."""

    def mapped(index: int, rows: Any) -> Iterator[Any]:
        with without_loopback():
            yield from mapper(index, rows)

    return mapped


def beyond_loopback(addresses: Addresses) -> Addresses:
    """Return the addresses that other hosts can reach, or all of them if there are none."""
    outer = {
        interface: [a for a in pairs if not ip_address(a[0]).is_loopback] for interface, pairs in addresses.items()
    }
    return {interface: pairs for interface, pairs in outer.items() if pairs} or addresses


#: Most seconds without an answer, however long ranks may wait for each other.
_SECONDS = 60.0
#: Number of unanswered keepalive probes, after half of the time, until a host counts as lost.
_QUESTIONS = 5
#: Attempts to connect; the wait doubles each time, from 1 s: 15 s in total. (The kernel's default takes 127 s.)
_CONNECTS = 3


def silence(deadline: float) -> float:
    """Return the seconds without an answer after which a host counts as lost.

    Args:
        deadline: seconds that ranks may wait for each other.
    """
    return max(2.0, min(deadline, _SECONDS))


@contextmanager
def notice_lost_hosts(seconds: float) -> Iterator[None]:
    """Make Horovod's connections from this process fail when the host at the other end is lost.

    Args:
        seconds: seconds without an answer.
    """
    network = horovod.runner.common.util.network
    original = network.socket

    class Socket(socket.socket):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)  # type: ignore[arg-type]
            keep_asking(self, seconds)

    patched = ModuleType("socket", socket.__doc__)
    patched.__dict__.update(socket.__dict__)
    patched.__dict__["socket"] = Socket
    network.socket = patched
    try:
        yield
    finally:
        network.socket = original


def keep_asking(connection: socket.socket, seconds: float) -> None:
    """Make the kernel end a connection, or an attempt to connect, after so many seconds without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": round(seconds / 2),
        "TCP_KEEPINTVL": round(seconds / 2 / _QUESTIONS),
        "TCP_KEEPCNT": _QUESTIONS,
        # Milliseconds for sent bytes that are not acknowledged; there are no keepalive probes then.
        "TCP_USER_TIMEOUT": round(1000 * seconds),
        "TCP_SYNCNT": _CONNECTS,
    }
    for name, value in options.items():
        option = getattr(socket, name, None)  # some systems lack some options
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, max(1, value))


#: Function of a Spark task, from its number and its rows to its results.
Mapper = Callable[[int, Any], Iterator[Any]]


def counting_from_start(mapper: Mapper) -> Mapper:
    """Wrap a mapper of Horovod, so that its task counts its least lifetime from the start of its rank."""

    def mapped(index: int, rows: Any) -> Iterator[Any]:
        count_from_start()
        yield from mapper(index, rows)

    return mapped


def count_from_start() -> None:
    """Make Horovod's task services in this process count from the start of their commands."""
    from horovod.runner.common.service.task_service import BasicTaskService
    from horovod.runner.common.util.timeout import Timeout
    from horovod.spark.task.task_service import SparkTaskService

    def run_command(service: Any, *args: Any, **more: Any) -> None:
        seconds = service._minimum_command_lifetime_s
        if seconds is not None:
            service._minimum_command_lifetime = Timeout(seconds, message="the least lifetime of a task")
        BasicTaskService._run_command(service, *args, **more)

    SparkTaskService._run_command = run_command
