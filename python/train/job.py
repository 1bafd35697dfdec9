"""Job of the ranks, and the places of the run's files: JSON values only, so that nothing is pickled but text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace import config
from headrace.config.effects import OF_CHECKPOINTS, keys_with
from headrace.manifest import Manifest, fingerprint
from headrace.storage import Location
from headrace.storage.objects.copies import SCRATCH
from headrace.train.carried_columns import DayDecay
from headrace.workspace import Workspace


class Job(BaseModel):
    """One training run, the same for all ranks.

    Lake and store must be visible to every rank at the same place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    home: Path
    #: The workspace's other roots, where they are not `home`. `scratch`: as the pipeline has it, on every host.
    lake: str | None = None
    store: str | None = None
    scratch: str | None = None
    registry: str | None = None
    pipeline: str
    ds: str
    key: str
    #: The manifest of the features stage: which dataset.
    features: Manifest
    model: config.Model
    train: config.Train
    #: Seconds between two progress messages of the chief.
    progress_seconds: float = 1.0
    #: A saved model to start from, by its name in the workspace.
    warm_start: str | None = None
    #: Saved models that parts of the network start from, by their names in the workspace.
    pretrained: Mapping[str, str] = Field(default={})
    #: Written to `fence` by the launch that this job belongs to; empty: nobody else can be at work.
    token: str = ""
    threads: int | None = None
    #: Weights of rows by their days; None: all count alike.
    decay: DayDecay | None = None
    #: The dataset of another day on whose split valid the model is measured too, by its name in the workspace.
    forgetting: str | None = None
    #: Of so many days one saved model has all rows; None: each has.
    full_copy_days: int | None = None
    #: Rows of older days in each step; None: none.
    replay: config.Replay | None = None
    #: The datasets that they are drawn from, by their names in the workspace, the oldest day's first.
    replayed: tuple[str, ...] = ()
    #: Where rows of ids start that the model of the warm start does not know.
    new_rows: Literal["random", "mean", "segment"] = "random"

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing besides the workspace."""
        return ()

    @property
    def ws(self) -> Workspace:
        return Workspace(self.home, host_scratch=os.environ.get(SCRATCH) or None).of(self)

    @property
    def folder(self) -> Location:
        """checkpoints/, model/ and the run's small files."""
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
        """File in which a rank leaves an error for the user."""
        return self.ranks_folder / "error.json"

    @property
    def ranks_folder(self) -> Location:
        """Folder of the ranks' heartbeats and last errors (headrace.train.callbacks.watchdog); one for each launch."""
        return self.folder.transient() / f"ranks-{self.token}"

    @property
    def stop_file(self) -> Location:
        """The driver makes it to ask the ranks of its launch to stop."""
        return self.ranks_folder / "stop"

    @property
    def metrics_file(self) -> Location:
        """Measurements of the loop (headrace.train.callbacks.metrics_log), of the launch that went to the end."""
        return self.folder / "metrics.jsonl"

    @property
    def launch_metrics_file(self) -> Location:
        """The same while this launch measures it; a file for each launch."""
        return self.folder / f"{METRICS_OF_LAUNCH}{self.token}.jsonl" if self.token else self.metrics_file

    def earlier_metrics_files(self) -> list[Location]:
        """Return the metrics files of all launches of the run."""
        return [p for p in self.folder.entries() if p == self.metrics_file or p.name.startswith(METRICS_OF_LAUNCH)]

    @property
    def replicates_file(self) -> Location:
        """The metrics in each replicate of the bootstrap (headrace.train.evaluation.bootstrap)."""
        return self.folder / REPLICATES

    @property
    def trace(self) -> Location:
        """Profile mode's trace (headrace.train.callbacks.tracing)."""
        return self.folder / "trace.json"

    @property
    def config_fingerprint(self) -> str:
        """Fingerprint of what must stay as it is between a checkpoint and its continuation."""
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
        """End this process where a newer launch of the same run has begun.

        A driver that is killed may leave ranks behind for a few seconds; they must not write beside their successors.
        """
        if self.is_overtaken:
            os._exit(1)


#: What the names of files of metrics begin with that are of one launch.
METRICS_OF_LAUNCH = "metrics-"
#: In the folder of a run, beside its model.
REPLICATES = "replicates.json"
