"""Result of a rank and of a run, as JSON; the errors that end a run; the phases of its start.

Times of phases are wall-clock: they are taken in three processes. Where the chief runs on another machine than the
driver, `ranks` has the difference of the two clocks in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, UserError
from headrace.storage import LeaseLost
from headrace.storage.file_faults import DiskFull

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
    """Return the start time of this process, seconds since 1970."""
    return float(psutil.Process().create_time())


def driver_phase_ends(start: float | None = None) -> dict[str, float]:
    """BEGIN, and the end of `jvm` where the parent is spark-submit's JVM.

    Args:
        start: when the stage's turn came in a process that has served others; None: with the process.
    """
    if start is not None:
        return {BEGIN: start}
    process_start = process_began()
    parent = psutil.Process(os.getppid())
    if parent.name() != "java":
        return {BEGIN: process_start}
    return {BEGIN: float(parent.create_time()), "jvm": process_start}


def end_phase(phase_ends: dict[str, float], phase: str) -> None:
    """Note the end of a phase, unless it was noted before."""
    phase_ends.setdefault(phase, time.time())


def phase_seconds(phase_ends: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase whose end is known, and their sum as `total`; {} where the beginning is not."""
    if BEGIN not in phase_ends:
        return {}
    seconds, previous_end = {}, phase_ends[BEGIN]
    for phase in PHASES:
        if phase in phase_ends:
            seconds[phase] = round(phase_ends[phase] - previous_end, 2)
            previous_end = phase_ends[phase]
    return {**seconds, "total": round(previous_end - phase_ends[BEGIN], 2)}


def show_startup(seconds: Mapping[str, float]) -> str:
    """One line, as people read it."""
    phases = ", ".join(f"{name.replace('_', ' ')} {s:.1f}" for name, s in seconds.items() if name != "total")
    return f"first step after {seconds['total']:.1f} s: {phases}"


class TrainingReport(BaseModel):
    """Report of a run, by the chief."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    #: Rows of an epoch, negatives included; rows of the evaluation splits.
    rows: dict[str, int]
    steps: int
    steps_per_epoch: int
    resumed_from_step: int
    warm_start: str | None
    metrics: dict[str, float | None]
    curve: list[dict[str, float]]
    evals: list[dict[str, float | None]]
    #: The evaluated step whose weights the model has.
    best_step: int
    calibration_bins: list[dict[str, Any]]
    #: By split (valid, test, rank): rows, metrics, intervals, slices, calibration_bins; empty where the spec asks for
    #: nothing besides the basic metrics and there is no split `test`.
    evaluation: dict[str, dict[str, Any]] = Field(default_factory=dict)
    #: With `retrain.full_copy_days`: bytes of the saved embeddings, of the newest whole copy, and the model that they
    #: lie upon (None: they are whole).
    saved: dict[str, Any] = Field(default_factory=dict)
    #: Of `retrain.forgetting_day`: metrics, rows; empty where none is asked for or its rows cannot be read.
    forgetting: dict[str, Any] = Field(default_factory=dict)
    #: By feature of raw ids: rows, waiting, load, admitted, evicted, hit_share (training), oov_share (valid), mib.
    dynamic: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    #: By table in host memory with hot rows on GPUs: rows, share (that GPUs hold), lookups, hit_share.
    cached: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    #: Seconds for which the chief's loop waited for data in this run.
    data_wait_seconds: float
    #: Seconds for which it waited for checkpoints: for writing them, or for the upload of the one before.
    checkpoint_wait_seconds: float = 0.0
    #: Profile mode: milliseconds of a step by part, and `step`, their sum.
    profile: dict[str, float] = Field(default_factory=dict)
    #: Seconds of each part of the start of the attempt that finished, and `total` (headrace.train.result).
    startup_seconds: dict[str, float] = Field(default_factory=dict)
    peak_memory_mib: dict[str, float] = Field(default_factory=dict)
    #: Processor time by rank, with its data workers that have ended.
    core_seconds: dict[str, float] = Field(default_factory=dict)


class RankError(BaseModel):
    """An error that a rank reports to the user."""

    model_config = ConfigDict(extra="forbid")

    rank: int
    message: str
    diverged_at: int | None = None
    full_disk: bool = False
    #: A store of objects, or a file system.
    store_failed: bool = False
    #: Of those: it was away.
    store_away: bool = False
    #: Another run has been at work on the same.
    lease_lost: bool = False

    def exception(self) -> UserError:
        """Return the exception that the driver raises."""
        if self.diverged_at is not None:
            return Diverged(self.message, self.diverged_at)
        if self.store_failed:
            return StoreWasAway(self.message) if self.store_away else StoreFailed(self.message)
        if self.lease_lost:
            return LeaseLost(self.message)
        return DiskFull(self.message) if self.full_disk else UserError(self.message)


class RankResult(BaseModel):
    """Result of a rank that was not killed: one of the first four fields."""

    model_config = ConfigDict(extra="forbid")

    report: TrainingReport | None = None
    error: RankError | None = None
    #: Asked to stop: after which step, of how many.
    stopped: tuple[int, int] | None = None
    #: Another rank was lost: Horovod's message.
    lost: str = ""
    #: When each phase of the start ended (headrace.train.result).
    phase_ends: dict[str, float] = Field(default_factory=dict)


class StoreFailed(UserError):
    """A store of objects did not do as asked, after its client tried again, or a disk or file system has failed.

    Another attempt may be answered.
    """

    exit_code = EXIT_FAILURE


class StoreWasAway(StoreFailed):
    """Error of a store that could not be reached: there is nothing to mend."""

    exit_code = EXIT_INCOMPLETE


class Diverged(UserError):
    """The loss, a gradient or a weight is NaN or infinite at `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Stopped(Exception):
    """The ranks were asked to stop, and did so after `step` of `total` steps, with a checkpoint."""

    def __init__(self, step: int, total: int) -> None:
        super().__init__(f"stopped at step {step} of {total}")
        self.step, self.total = step, total


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """`auc 0.7312, log_loss 0.4410, ...`; those without a value are left out."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if value is not None)
