"""From `spark-submit` to the first step: when each part of the way was over.

Marks are wall-clock times: they are taken in three processes. Where the chief runs on another machine than the driver,
`ranks` has the difference of the two clocks in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import psutil

#: The parts in order, each with what happens in it.
PARTS: Mapping[str, str] = {
    "jvm": "spark-submit: the JVM, until it starts the driver's Python",
    "driver": "the driver's imports, the look at what is to be done, the dataset's footers",
    "session": "the Spark session; on a cluster the request for executors",
    "ranks": "executors, tasks, Horovod's registration, until the chief's process begins",
    "imports": "the chief's imports",
    "horovod": "hvd.init: the ranks find each other",
    "model": "the dataset's footers, the model, a checkpoint or an earlier model if there is one",
    "first_step": "the first row groups and the first step",
}
#: The mark that the first part is measured from.
BEGIN = "begin"


def process_began() -> float:
    """When this process was started, seconds since 1970."""
    return float(psutil.Process().create_time())


def driver_marks() -> dict[str, float]:
    """BEGIN, and the end of `jvm` where the parent is spark-submit's JVM."""
    own = process_began()
    parent = psutil.Process(os.getppid())
    if parent.name() != "java":
        return {BEGIN: own}
    return {BEGIN: float(parent.create_time()), "jvm": own}


def mark(marks: dict[str, float], part: str) -> None:
    """Note that a part is over, unless it was before."""
    marks.setdefault(part, time.time())


def seconds_of(marks: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each part that was marked, and their sum as `total`; {} where there is no beginning."""
    if BEGIN not in marks:
        return {}
    found, before = {}, marks[BEGIN]
    for part in PARTS:
        if part in marks:
            found[part] = round(marks[part] - before, 2)
            before = marks[part]
    return {**found, "total": round(before - marks[BEGIN], 2)}


def show(seconds: Mapping[str, float]) -> str:
    """One line, as people read it."""
    parts = ", ".join(f"{part.replace('_', ' ')} {s:.1f}" for part, s in seconds.items() if part != "total")
    return f"first step after {seconds['total']:.1f} s: {parts}"
