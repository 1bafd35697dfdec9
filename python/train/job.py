"""What a rank is told, and what it answers: JSON values only, so that nothing is pickled but text."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace import config
from headrace.errors import UserError
from headrace.manifest import Manifest, fingerprint
from headrace.workspace import Workspace


class Job(BaseModel):
    """One training run, the same for all ranks.

    The workspace must be visible to every rank at the same path.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    home: Path
    pipeline: str
    ds: str
    key: str
    #: The manifest of the features stage: which dataset.
    features: Manifest
    model: config.Model
    train: config.Train
    #: Seconds between two progress messages of the chief.
    progress_seconds: float = 1.0
    #: A saved model to start from.
    warm_start: Path | None = None
    #: Written to `fence` by the launch that this job belongs to; empty: nobody else can be at work.
    token: str = ""
    threads: int | None = None

    @property
    def ws(self) -> Workspace:
        return Workspace(self.home)

    @property
    def folder(self) -> Path:
        """checkpoints/, model/ and the run's small files."""
        return self.ws.model(self.pipeline, self.ds, self.key).local_path()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def saved_model(self) -> Path:
        return self.folder / "model"

    @property
    def fence(self) -> Path:
        return self.folder / "launch"

    @property
    def voice(self) -> Path:
        """Where the chief says how far it is (headrace.train.callbacks.progress); a file for each launch."""
        return self.folder / f"progress-{self.token}.jsonl"

    @property
    def complaint(self) -> Path:
        """Where a rank leaves a message for the user."""
        return self.folder / "complaint.json"

    @property
    def ranks_folder(self) -> Path:
        """Where each rank says how far it is (headrace.train.callbacks.watchdog); a folder for each launch."""
        return self.folder / f"ranks-{self.token}"

    @property
    def stop_file(self) -> Path:
        """The driver makes it to ask the ranks of its launch to stop."""
        return self.ranks_folder / "stop"

    @property
    def journal(self) -> Path:
        """What the loop measured (headrace.train.callbacks.metrics_log)."""
        return self.folder / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """Profile mode's trace (headrace.train.callbacks.profile)."""
        return self.folder / "trace.json"

    @property
    def obeyed(self) -> str:
        """Fingerprint of what must stay as it is between a checkpoint and its continuation."""
        loop = self.train.model_dump(mode="json", include=set(OBEYED))
        # Where rows live changes no weight; how they are rounded does, at rest and on their way.
        sharding = self.train.sharding
        loop |= {} if sharding.wire == "fp32" else {"wire": sharding.wire}
        loop["storage"] = {"": sharding.storage, **{n: t.storage for n, t in sharding.tables.items() if t.storage}}
        return fingerprint({"model": self.model.model_dump(mode="json"), "train": loop, "dataset": self.features.key})

    def check_fence(self) -> None:
        """End this process where a newer launch of the same run has begun.

        A driver that is killed may leave ranks behind for a few seconds; they must not write beside their successors.
        """
        if self.token and self.fence.read_text(encoding="utf-8") != self.token:
            os._exit(1)


#: Keys of config.Train that change the weights; the others say how fast and how safely they are come by.
OBEYED = (
    "batch_size",
    "streams",
    "epochs",
    "max_steps",
    "accumulate",
    "eval_steps",
    "patience",
    "seed",
    "dense",
    "embeddings",
    "negatives",
    "warm_decay",
)


def step_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, newest first; whether they are whole is found out by loading."""
    found = [p.name.removeprefix("step-") for p in folder.glob("step-*") if p.is_dir()]
    return sorted((int(n) for n in found if n.isdigit()), reverse=True)


class Report(BaseModel):
    """What the chief answers."""

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
    #: By feature of raw ids: rows, waiting, load, admitted, evicted, hit_share (training), oov_share (valid), mib.
    dynamic: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    #: By table in host memory with hot rows on GPUs: rows, share (that GPUs hold), lookups, hit_share.
    cached: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    #: Seconds for which the chief's loop waited for data in this run.
    data_wait_seconds: float
    #: Profile mode: milliseconds of a step by part, and `step`, their sum.
    profile: dict[str, float] = Field(default_factory=dict)
    #: Seconds of each part of the start of the try that finished, and `total` (headrace.train.launch.startup).
    startup_seconds: dict[str, float] = Field(default_factory=dict)
    peak_memory_mib: dict[str, float] = Field(default_factory=dict)


class Complaint(BaseModel):
    """What a rank that ends has to say to the user."""

    model_config = ConfigDict(extra="forbid")

    rank: int
    message: str
    diverged_at: int | None = None
    full_disk: bool = False

    def error(self) -> UserError:
        """As what the driver raises it."""
        if self.diverged_at is not None:
            return Diverged(self.message, self.diverged_at)
        return DiskFull(self.message) if self.full_disk else UserError(self.message)


class Answer(BaseModel):
    """How a rank ended, if it was not killed: one of the first four."""

    model_config = ConfigDict(extra="forbid")

    report: Report | None = None
    complaint: Complaint | None = None
    #: Asked to stop: after which step, of how many.
    stopped: tuple[int, int] | None = None
    #: Another rank was gone; what Horovod said of it.
    lost: str = ""
    #: When which part of the start was over (headrace.train.launch.startup).
    marks: dict[str, float] = Field(default_factory=dict)


class DiskFull(UserError):
    """There is no room for what must be written. Another try may find some."""


def is_full(e: OSError) -> bool:
    """Whether it is for want of room: the disk is full, a quota or the largest size of a file is reached."""
    return e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Diverged(UserError):
    """The loss is no number any more at `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Stopped(Exception):
    """The ranks were asked to stop, and did so after `step` of `total` steps, with a checkpoint."""

    def __init__(self, step: int, total: int) -> None:
        super().__init__(f"stopped at step {step} of {total}")
        self.step, self.total = step, total
