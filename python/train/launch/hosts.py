"""Hosts of ranks: task slots of a Spark cluster, addresses of services, lost hosts, the end of a task of a rank."""

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
#: Seconds until the first message about waiting, and between two of them.
_PATIENCE_SECONDS = 5.0
_EVERY_SECONDS = 15.0


def count_slots(spark: SparkSession) -> int:
    """Tasks that the executors there now can run at once, by their cores, GPUs and what a task wants of both.

    It is Spark's own count, which a barrier stage is checked against; the two that PySpark offers are set by the user
    (`defaultParallelism`), or know no GPUs.
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
            UserError: there never were enough slots.
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
    """Count slots in a thread for the length of the block, and say so where they are late.

    Args:
        count: how many there are now.
        required: one for each rank.
        seconds: that the launch waits; for the messages.
        started: whether the ranks are at work, so that nobody waits any more.
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


#: By interface, its addresses: each with the service's port.
Addresses = dict[str, list[tuple[str, int]]]


@contextmanager
def without_loopback() -> Iterator[None]:
    """Let services that this process makes name no address of loopback, for the length of the block."""
    from horovod.runner.common.util.network import BasicService

    original = BasicService._get_local_addresses
    BasicService._get_local_addresses = lambda service: beyond_loopback(original(service))
    try:
        yield
    finally:
        BasicService._get_local_addresses = original


def reached_by_others(mapper: Mapper) -> Mapper:
    """Return a mapper of Horovod's, in a task whose service names no address of loopback."""

    def mapped(index: int, rows: Any) -> Iterator[Any]:
        with without_loopback():
            yield from mapper(index, rows)

    return mapped


def beyond_loopback(addresses: Addresses) -> Addresses:
    """Return the addresses that other hosts reach; all of them where there are none."""
    outer = {
        interface: [a for a in pairs if not ip_address(a[0]).is_loopback] for interface, pairs in addresses.items()
    }
    return {interface: pairs for interface, pairs in outer.items() if pairs} or addresses


#: Most seconds without an answer, however long ranks may wait for each other.
_SECONDS = 60.0
#: Questions without an answer, after half of the time, until a host is taken as gone.
_QUESTIONS = 5
#: Attempts to connect, each after twice the time of the one before, from 1 s: 15 s in all. (The kernel's own: 127 s.)
_CONNECTS = 3


def silence(deadline: float) -> float:
    """Return the seconds without an answer after which a host counts as lost.

    Args:
        deadline: seconds that ranks may wait for each other.
    """
    return max(2.0, min(deadline, _SECONDS))


@contextmanager
def notice_lost_hosts(seconds: float) -> Iterator[None]:
    """Let a connection that Horovod makes from this process fail when the host at its other end is lost.

    Args:
        seconds: without an answer.
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
    """Let the kernel end a connection, or an attempt at one, whose other end has not answered for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": round(seconds / 2),
        "TCP_KEEPINTVL": round(seconds / 2 / _QUESTIONS),
        "TCP_KEEPCNT": _QUESTIONS,
        # Of what was sent and is not acknowledged: then nothing is asked. In milliseconds.
        "TCP_USER_TIMEOUT": round(1000 * seconds),
        "TCP_SYNCNT": _CONNECTS,
    }
    for name, value in options.items():
        option = getattr(socket, name, None)  # not every system has them all
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, max(1, value))


#: What a Spark task runs: its number and its rows, to its results.
Mapper = Callable[[int, Any], Iterator[Any]]


def counting_from_start(mapper: Mapper) -> Mapper:
    """Return a mapper of Horovod's, in a task that counts its least lifetime from the start of its rank."""

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
