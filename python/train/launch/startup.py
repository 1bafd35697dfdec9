"""From the application's (in one that has served other stages: the stage's) start to the first step: each phase's end.

Times are wall-clock: they are taken in three processes. Where the chief runs on another machine than the driver,
`ranks` has the difference of the two clocks in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import psutil

#: The phases in order, each with what happens in it.
PHASES: Mapping[str, str] = {
    "jvm": "spark-submit: the JVM, until it starts the driver's Python; else the JVM is part of `session`",
    "driver": "the driver's imports, the check of what is to be done, the dataset's footers",
    "session": "the Spark session; on a cluster the request for executors",
    "ranks": "executors, tasks, Horovod's registration, until the chief's process begins",
    "imports": "the chief's imports",
    "horovod": "hvd.init: the ranks find each other",
    "model": "the dataset's footers, the model, a checkpoint or an earlier model if there is one",
    "first_step": "the first row groups and the first step",
}
#: The beginning of the first phase.
BEGIN = "begin"


def process_began() -> float:
    """When this process was started, seconds since 1970."""
    return float(psutil.Process().create_time())


def driver_phase_ends(began: float | None = None) -> dict[str, float]:
    """BEGIN, and the end of `jvm` where the parent is spark-submit's JVM.

    Args:
        began: when the stage's turn came in a process that has served others; None: with the process.
    """
    if began is not None:
        return {BEGIN: began}
    own = process_began()
    parent = psutil.Process(os.getppid())
    if parent.name() != "java":
        return {BEGIN: own}
    return {BEGIN: float(parent.create_time()), "jvm": own}


def end_phase(phase_ends: dict[str, float], phase: str) -> None:
    """Note the end of a phase, unless it was noted before."""
    phase_ends.setdefault(phase, time.time())


def phase_seconds(phase_ends: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase whose end is known, and their sum as `total`; {} where the beginning is not."""
    if BEGIN not in phase_ends:
        return {}
    found, before = {}, phase_ends[BEGIN]
    for phase in PHASES:
        if phase in phase_ends:
            found[phase] = round(phase_ends[phase] - before, 2)
            before = phase_ends[phase]
    return {**found, "total": round(before - phase_ends[BEGIN], 2)}


def show(seconds: Mapping[str, float]) -> str:
    """One line, as people read it."""
    phases = ", ".join(f"{name.replace('_', ' ')} {s:.1f}" for name, s in seconds.items() if name != "total")
    return f"first step after {seconds['total']:.1f} s: {phases}"
