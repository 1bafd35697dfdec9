"""Who makes a day's files: threads of this process, or Spark's tasks. Both call `write_file`: the bytes are equal."""

from __future__ import annotations

import functools
import logging
import operator
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.config import Spark
from headrace.generate.landing_files import DayPlan, write_file
from headrace.generate.truth import Tally
from headrace.storage import Location
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("headrace.generate")

#: Makes all files of a day in a folder, reporting how many exist so far; returns the sum of their tallies.
Writer = Callable[[DayPlan, Location, Callable[[int], None]], Tally]

#: NumPy, Arrow and zlib let go of Python's lock, so threads share the cores; more of them hold more files in memory.
_THREADS = 4
_POLL_SECONDS = 1.0
_LOG_SECONDS = 10.0


def write_locally(day: DayPlan, folder: Location, report: Callable[[int], None]) -> Tally:
    """A `Writer` on this process's threads."""
    found: dict[int, Tally] = {}
    last_logged = time.monotonic()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(write_file, day, file, folder): file for file in range(day.files)}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                report(len(found))
                last_logged = _log_progress(day, len(found), last_logged)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return functools.reduce(operator.add, (found[file] for file in range(day.files)))


@contextmanager
def writer_on_spark(conf: Spark, ws: Workspace) -> Iterator[Writer]:
    """A `Writer` whose files are tasks of a Spark session (an active one is used), one task a file."""
    # Imported here: who writes a small day needs no Spark, and does not wait for its import.
    from headrace.lake.session import session

    with session(conf, ws, "headrace-generate") as spark:
        yield functools.partial(_write_on_spark, spark)


def _write_on_spark(spark: SparkSession, day: DayPlan, folder: Location, report: Callable[[int], None]) -> Tally:
    context, group = spark.sparkContext, f"generate-{uuid.uuid4().hex}"

    def job() -> Tally:
        # In the thread that submits: job groups belong to threads.
        context.setJobGroup(group, f"generate {day.ds}")
        files = context.parallelize(range(day.files), day.files)
        # A tree: sums of histograms (2 MiB each) are added up by the executors, not all by the driver.
        total: Tally = files.map(lambda file: write_file(day, file, folder)).treeReduce(operator.add)
        return total

    last_logged, seen = time.monotonic(), 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job)
        try:
            while not future.done():
                time.sleep(_POLL_SECONDS)
                # Only finished files are listed.
                if (count := sum(1 for p in folder.entries() if p.name.startswith("part-"))) != seen:
                    seen = count
                    report(seen)
                last_logged = _log_progress(day, seen, last_logged)
        except BaseException:
            context.cancelJobGroup(group)
            raise
        return future.result()


def _log_progress(day: DayPlan, files: int, last_logged: float) -> float:
    """Log a line if the last one is long ago; the time of the last one."""
    now = time.monotonic()
    if now - last_logged < _LOG_SECONDS:
        return last_logged
    log.info("%s: %d of %d files, %s rows", day.ds, files, day.files, f"{day.rows * files // day.files:,}")
    return now
