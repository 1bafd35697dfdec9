"""The days of the run: landing files, the lake and the datasets by the command line, then each day's training.

Trainings are the stage's, one after another in this process, the only rank: a day's takes some seconds, and ranks of
their own, Spark's tasks and an import of torch for each day would take as long again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import torch

from headrace.config import Spec, load_overlay, load_spec
from headrace.errors import UserError
from headrace.features.layout.split_rule import time_ranges
from headrace.stage import Context, run_stage
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train_local
from headrace.train.stage import Train
from headrace.workspace import Workspace, checkout

PIPELINE = "clicks"
#: Days whose datasets are made before the first of them is trained.
_AT_ONCE = 10


class TrainHere(Train):
    """The stage `train`, in this process; its key is the same."""

    def train(self, ctx: Context, job: Job, phase_ends: dict[str, float]) -> TrainingReport:
        torch.set_num_threads(job.threads or 1)
        return train_local(job)


@dataclass(frozen=True)
class RetrainRun:
    """Days to run, with their workspace and settings.

    Attributes:
        home: the workspace.
        days: how many days are trained.
        overlay: keys over the pipeline `clicks`: the log's and the training's.
        overrides: more of them, `key=value`.
    """

    home: Path
    days: int
    overlay: Path
    overrides: tuple[str, ...] = ()

    @property
    def ws(self) -> Workspace:
        return Workspace(self.home)

    def spec(self) -> Spec:
        """Return the pipeline."""
        return load_spec(PIPELINE, [*load_overlay(self.overlay), *self.overrides])

    def dates(self) -> list[str]:
        """Return the days that are trained: from the first whose window is full."""
        spec = self.spec()
        assert spec.generate is not None
        days_before = (date(2026, 1, 1) - date.fromisoformat(time_ranges(spec.features, "2026-01-01")[0][0])).days
        first = date.fromisoformat(spec.generate.start) + timedelta(days=days_before)
        return [(first + timedelta(days=i)).isoformat() for i in range(self.days)]

    def execute(self) -> Iterator[str]:
        """Run what is missing, and give each day once it is trained. The next call goes on where one has ended.

        Raises:
            UserError: a command or a training fails.
        """
        spec, dates = self.spec(), self.dates()
        assert spec.generate is not None
        self._headrace("generate", PIPELINE, "--until", dates[-1])
        self._headrace("run", PIPELINE, "--ds", spec.generate.start, "--until", dates[-1], "--to", "ingest")
        for first in range(0, len(dates), _AT_ONCE):
            days = dates[first : first + _AT_ONCE]
            of_datasets = ("--from", "features", "--to", "features")
            self._headrace("run", PIPELINE, "--ds", days[0], "--until", days[-1], *of_datasets)
            for ds in days:
                run_stage(TrainHere(), spec, self.ws, ds)
                yield ds

    def _headrace(self, *arguments: str) -> None:
        place: Sequence[str] = ("--home", str(self.home), "--overlay", str(self.overlay))
        sets = [a for override in self.overrides for a in ("--set", override)]
        process = subprocess.Popen([sys.executable, "-m", "headrace.cli", *arguments, *place, *sets], cwd=checkout())
        try:
            code = process.wait()
        finally:  # whoever stops this stops the stage too
            process.terminate()
            process.wait()
        if code:
            raise UserError(f"headrace {' '.join(arguments[:2])} failed with {code}; the same command goes on")
