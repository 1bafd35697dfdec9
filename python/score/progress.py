"""What one sees while pairs are scored."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import Accumulator

from headrace import progress as listeners
from headrace.progress import Progress

log = logging.getLogger("headrace.score")

_SECONDS = 2.0


@contextmanager
def progress(counter: Accumulator[int], pairs: int) -> Iterator[None]:
    """A line every few seconds about the tasks that have finished."""
    done, tick = threading.Event(), time.perf_counter()

    def tell() -> None:
        first: tuple[int, float] | None = None
        shown = 0
        while not done.wait(_SECONDS):
            # A task that is run twice counts twice.
            scored, now = min(counter.value, pairs), time.perf_counter()
            if scored == shown:
                continue
            shown = scored
            line = f"{scored:,}/{pairs:,} pairs ({100 * scored // pairs} %), {scored / (now - tick):,.0f} pairs/s"
            left = None
            # The first tasks pay for the start of the workers and the load of the model; the pace is that of the rest.
            if first is None:
                first = (scored, now)
            else:
                left = (pairs - scored) * (now - first[1]) / (scored - first[0])
                line += f", {left:.0f} s left"
            log.info("score: %s", line)
            listeners.tell(Progress(scored, pairs, "pairs", scored / (now - tick), left))

    thread = threading.Thread(target=tell, name="score-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
