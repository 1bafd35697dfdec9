"""Task slots of a Spark cluster. All ranks run at once, so training begins when there is a slot for each of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """What is known of the slots while a launch waits for them."""

    def __init__(self, wanted: int, seconds: float) -> None:
        self.wanted, self.seconds = wanted, seconds
        self.found = 0

    def check(self, master: str) -> None:
        """Explain a start that took too long.

        Raises:
            UserError: there never were enough slots.
        """
        if self.found < self.wanted:
            raise UserError(
                f"train.ranks is {self.wanted}, but after {self.seconds:g} s (train.start_seconds) Spark ({master}) "
                f"has {self.found} task slots for them, and all ranks run at once: ask for more executors or cores "
                f"(spark.executor.instances, spark.executor.cores, spark.cores.max; with GPUs a task's share of one), "
                f"lower train.ranks, or wait longer"
            )


@contextmanager
def watch_slots(count: Callable[[], int], wanted: int, seconds: float, started: Callable[[], bool]) -> Iterator[Slots]:
    """Count slots in a thread for the length of the block, and say so where they are late.

    Args:
        count: how many there are now.
        wanted: one for each rank.
        seconds: that the launch waits; for the messages.
        started: whether the ranks are at work, so that nobody waits any more.
    """
    slots, end = Slots(wanted, seconds), threading.Event()

    def run() -> None:
        began, said = time.monotonic(), 0.0
        while not started():
            slots.found = max(slots.found, count())
            waited = time.monotonic() - began
            if slots.found >= wanted:
                if said:
                    log.info("%d task slots are there after %.0f s", slots.found, waited)
                return
            if waited >= (said + _EVERY_SECONDS if said else _PATIENCE_SECONDS):
                said = waited
                log.info(
                    "waiting for task slots: %d of %d after %.0f s, at most %.0f s (train.start_seconds)",
                    slots.found,
                    wanted,
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
