"""Job of the ranks, paths of the run's files, results of a rank and of a run, errors, and phases of the start.

Jobs and results have only JSON values, so only text is pickled. Times of the phases are wall-clock times, since they
are taken in three processes. If the chief runs on another machine than the driver, `ranks` includes the difference of
their clocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from headrace import config
from headrace.config.section import OF_CHECKPOINTS, keys_with
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, UserError
from headrace.errors.stores import DiskFull
from headrace.stage.manifest import Manifest, fingerprint
from headrace.storage import LeaseLost, Location
from headrace.storage.uri import SCRATCH
from headrace.train.carried_columns import DayDecay


class Job(BaseModel):
    """One training run, the same for all ranks.

    Every rank must see lake and store by the same paths.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    home: Path
    #: The workspace's other roots, if they are not `home`. `scratch`: the pipeline's, on every host.
    lake: str | None = None
    store: str | None = None
    scratch: str | None = None
    registry: str | None = None
    pipeline: str
    ds: str
    key: str
    #: Manifest of the stage `features`, which names the dataset.
    features: Manifest
    model: config.Model
    train: config.Train
    #: Seconds between two progress messages of the chief.
    progress_seconds: float = 1.0
    #: A saved model to start from, by its name in the workspace.
    warm_start: str | None = None
    #: Saved models that parts of the network start from, by their names in the workspace.
    pretrained: Mapping[str, str] = Field(default={})
    #: Token of the launch, which it writes to `fence`; empty: no other launch is possible.
    token: str = ""
    threads: int | None = None
    #: Weights of rows by their days; None: all rows have the same weight.
    decay: DayDecay | None = None
    #: Dataset of another day, by its name in the workspace, on whose split `valid` the model is measured too.
    forgetting: str | None = None
    #: Number of days of which one saved model has all rows; None: each model has all rows.
    full_copy_days: int | None = None
    #: Replay of older days' rows in each step; None: no replay.
    replay: config.Replay | None = None
    #: Datasets of the replayed rows, by their names in the workspace, oldest day first.
    replayed: tuple[str, ...] = ()
    #: Initial rows of ids that the model of the warm start does not know.
    new_rows: Literal["random", "mean", "segment"] = "random"

    @property
    def reads(self) -> tuple[str, ...]:
        """URIs outside the workspace: none."""
        return ()

    @property
    def ws(self) -> Workspace:
        return Workspace(self.home, host_scratch=os.environ.get(SCRATCH) or None).of(self)

    @property
    def folder(self) -> Location:
        """Folder of the run: checkpoints/, model/ and small files."""
        return self.ws.model(self.pipeline, self.ds, self.key)

    @property
    def checkpoints(self) -> Location:
        return self.folder / "checkpoints"

    @property
    def saved_model(self) -> Location:
        return self.folder / "model"

    @property
    def fence(self) -> Location:
        return self.folder / "launch"

    @property
    def progress_file(self) -> Location:
        """File in which rank 0 writes its progress (headrace.train.callbacks.progress); one for each launch."""
        return self.folder.transient() / f"progress-{self.token}.jsonl"

    @property
    def error_file(self) -> Location:
        """File to which a rank writes an error for the user."""
        return self.ranks_folder / "error.json"

    @property
    def ranks_folder(self) -> Location:
        """Folder of the ranks' heartbeats and last errors (headrace.train.callbacks.watchdog); one for each launch."""
        return self.folder.transient() / f"ranks-{self.token}"

    @property
    def stop_file(self) -> Location:
        """File that the driver creates to request that the ranks of its launch stop."""
        return self.ranks_folder / "stop"

    @property
    def metrics_file(self) -> Location:
        """File of measurements (headrace.train.callbacks.metrics_log) of the launch that completed the run."""
        return self.folder / "metrics.jsonl"

    @property
    def launch_metrics_file(self) -> Location:
        """File of this launch's measurements; one for each launch."""
        return self.folder / f"{METRICS_OF_LAUNCH}{self.token}.jsonl" if self.token else self.metrics_file

    def earlier_metrics_files(self) -> list[Location]:
        """Return the metrics files of all launches of the run."""
        return [p for p in self.folder.entries() if p == self.metrics_file or p.name.startswith(METRICS_OF_LAUNCH)]

    @property
    def replicates_file(self) -> Location:
        """File of the metrics in each replicate of the bootstrap (headrace.train.evaluation.bootstrap)."""
        return self.folder / REPLICATES

    @property
    def trace(self) -> Location:
        """File of profile mode's trace (headrace.train.callbacks.tracing)."""
        return self.folder / "trace.json"

    @property
    def config_fingerprint(self) -> str:
        """Fingerprint of the settings that must not change between a checkpoint and its continuation."""
        loop = keys_with(self.train, OF_CHECKPOINTS)
        loop |= {} if self.decay is None else {"decay": self.decay.model_dump(mode="json", exclude_defaults=True)}
        if self.replay is not None and self.replayed:
            loop |= {
                "replay": {**self.replay.model_dump(mode="json"), "datasets": list(self.replayed), "key": self.key}
            }
        loop |= {"pretrained": dict(self.pretrained)} if self.pretrained else {}
        model = keys_with(self.model, OF_CHECKPOINTS)
        return fingerprint({"model": model, "train": loop, "dataset": self.features.key})

    @property
    def is_overtaken(self) -> bool:
        """True if a newer launch of the same run has begun."""
        return bool(self.token) and self.fence.read_text() != self.token

    def check_fence(self) -> None:
        """End this process if a newer launch of the same run has begun.

        Ranks of a killed driver may live on for a few seconds; they must not write beside their successors.
        """
        if self.is_overtaken:
            os._exit(1)


#: Prefix of the files of one launch's metrics.
METRICS_OF_LAUNCH = "metrics-"
#: File of the replicates in the folder of a run, beside its model.
REPLICATES = "replicates.json"


#: Phases of the start in order, each with a description.
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
#: Name of the start of the first phase.
BEGIN = "begin"


def process_began() -> float:
    """Return the start time of this process, seconds since 1970."""
    return float(psutil.Process().create_time())


def driver_phase_ends(start: float | None = None) -> dict[str, float]:
    """Return the time of BEGIN, and the end of `jvm` if the parent is spark-submit's JVM.

    Args:
        start: start of the stage in a process that has run others; None: the start of the process.
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
    """Return the seconds of each phase whose end is known, and their sum as `total`; {} without a beginning."""
    if BEGIN not in phase_ends:
        return {}
    seconds, previous_end = {}, phase_ends[BEGIN]
    for phase in PHASES:
        if phase in phase_ends:
            seconds[phase] = round(phase_ends[phase] - previous_end, 2)
            previous_end = phase_ends[phase]
    return {**seconds, "total": round(previous_end - phase_ends[BEGIN], 2)}


def show_startup(seconds: Mapping[str, float]) -> str:
    """Return the startup phases as a line of text."""
    phases = ", ".join(f"{name.replace('_', ' ')} {s:.1f}" for name, s in seconds.items() if name != "total")
    return f"first step after {seconds['total']:.1f} s: {phases}"


class TrainingReport(BaseModel):
    """Report of a run, written by the chief."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    #: Number of rows of an epoch, with negatives, and of the evaluation splits.
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
    #: For each split (valid, test, rank): rows, metrics, intervals, slices, calibration_bins. Empty if the spec has
    #: basic metrics only and there is no split `test`.
    evaluation: dict[str, dict[str, Any]] = Field(default_factory=dict)
    #: With `retrain.full_copy_days`: bytes of the saved embeddings, bytes of the newest full copy, and the model to
    #: which the saved rows are changes (None: this is a full copy).
    saved: dict[str, Any] = Field(default_factory=dict)
    #: With `retrain.forgetting_day`: metrics and rows of that day; empty without it, or if its rows cannot be read.
    forgetting: dict[str, Any] = Field(default_factory=dict)
    #: For each feature of raw ids: rows, waiting, load, admitted, evicted, hit_share (train), oov_share (valid), mib.
    dynamic: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    #: For each table in host memory with hot rows on GPUs: rows, share (on GPUs), lookups, hit_share.
    cached: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    #: Seconds for which the chief's loop waited for data in this run.
    data_wait_seconds: float
    #: Seconds for which it waited for checkpoints: for their writing, or for the upload of the previous one.
    checkpoint_wait_seconds: float = 0.0
    #: Profile mode: milliseconds of a step by part, and `step`, their sum.
    profile: dict[str, float] = Field(default_factory=dict)
    #: Seconds of each part of the start of the attempt that finished, and `total` (headrace.train.job).
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
    #: Whether a store of objects or a file system has failed.
    store_failed: bool = False
    #: Whether the store could not be reached.
    store_away: bool = False
    #: Whether another process has taken over the run.
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
    #: Last step and total steps of a run that was asked to stop.
    stopped: tuple[int, int] | None = None
    #: Horovod's message if another rank was lost.
    lost: str = ""
    #: End of each phase of the start (headrace.train.job).
    phase_ends: dict[str, float] = Field(default_factory=dict)


class StoreFailed(UserError):
    """A store of objects has refused a request, also after retries, or a disk or file system has failed.

    Another attempt may succeed.
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
    """Return text such as `auc 0.7312, log_loss 0.4410`; metrics without a value are left out."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if value is not None)
