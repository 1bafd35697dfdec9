"""The days of the run, and measurements of each day's model.

Landing files, the lake and the datasets are made by the command line, then comes each day's training. Trainings are the
stage's, one after another in this process, the only rank: a day's takes some seconds, and ranks of their own, Spark's
tasks and an import of torch for each day would take as long again.

Each day's model is measured by its manifest, and the first day's model by each day's rows of the lake, beside the AUC
that a day's model could come to at best: it has never seen an id that is born on that day.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

import headrace as hr
from headrace.compute.counter_random import Floats, Ints
from headrace.config import Spec, load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.layout.files import time_ranges
from headrace.lake.delta.log import DeltaLog
from headrace.lake.generate.click_model import ITEM_BIAS, USER_BIAS, ClickModel, events
from headrace.lake.generate.population import alive, items, users
from headrace.lake.generate.truth import auc
from headrace.quality.report import facts
from headrace.quality.report.stage import read_truth
from headrace.stage import Context, run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train_local
from headrace.train.stage import Train

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


def knowable_auc(model: ClickModel, day: int) -> float | None:
    """Return the AUC over the rows that happen and land on a day (0 is the log's first) of the true logits without the
    biases of users and items that are born on it; None where rows are of one class.

    A bias is what no column tells (half of a taste is such a part, too, and stays in). With no new ids this is the
    day's ceiling.
    """
    params = model.params
    rows = np.arange(params.rows_per_day)
    log_events = events(model, np.full_like(rows, day), rows)
    new_users = users(params, _born(params.users, params.new_users, day), np.array([day]))
    new_items = items(params, _born(params.items, params.new_items, day), day)
    logit = (
        log_events.logit
        - USER_BIAS * _bias_of(log_events.users.id, log_events.users.bias, new_users.id)[log_events.user_row]
    )
    logit -= ITEM_BIAS * _bias_of(log_events.items.id, log_events.items.bias, new_items.id)[log_events.item_row]
    on_time = log_events.lag == 0
    return auc(logit[on_time], log_events.clicked[on_time].astype(np.float64))


def _born(first: int, growth: float, day: int) -> Ints:
    """Return the indices of those that are born on a day; those of the first day were there before."""
    return np.arange(alive(first, growth, day - 1) if day else first, alive(first, growth, day))


def _bias_of(ids: Ints, bias: Floats, new: Ints) -> Floats:
    """Return the biases of those that are new, 0 of the others."""
    return np.where(np.isin(ids, new), bias, 0.0)


@dataclass(frozen=True)
class DayResult:
    """Result of a day. AUCs of the rows that happened and landed on it."""

    ds: str
    rows: int
    #: Of the probabilities that the clicks were drawn from.
    ceiling: float
    #: Of what a model can know of them: `knowable_auc`.
    knowable: float
    #: Of the day's own model, of that of the first day, and of the day's model over the first day's rows (None where
    #: retrain.forgetting_day is not that day).
    retrained: float
    frozen: float
    first_day: float | None
    #: Seconds of features and training.
    seconds: float
    #: Bytes of the saved embeddings, the rows that changed alone where retrain.full_copy_days says so, and of a copy of
    #: all rows (None: all are saved).
    saved_bytes: int | None = None
    whole_bytes: int | None = None

    def share(self, value: float) -> float:
        """Return how far an AUC comes from 0.5 to the ceiling."""
        share = facts.ceiling_share(value, self.ceiling)
        assert share is not None
        return share

    @property
    def share_of_knowable(self) -> float:
        """Return how far the day's model comes from 0.5 to what it can come to."""
        share = facts.ceiling_share(self.retrained, self.knowable)
        assert share is not None
        return share


def measure(run: RetrainRun, file: Path) -> list[DayResult]:
    """Measure the days that are trained and not in `file` yet; return them and those that are. Written day by day.

    Raises:
        UserError: a model or the lake is damaged, or a model is better than the truth, which it must have seen then.
    """
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    dates = [d for d in run.dates() if manifest_of(run, d) is not None]
    if not dates:
        return []
    frozen = hr.Predictor(_model(run, dates[0]))
    for ds in dates:
        manifest = manifest_of(run, ds)
        assert manifest is not None
        if known.get(ds, {}).get("key") == manifest.key:
            continue
        rows, metrics = rows_of(run, ds), manifest.facts["metrics"]
        saved = manifest.facts.get("saved") or {}
        result = DayResult(
            ds=ds,
            rows=rows.num_rows,
            ceiling=ceiling_of(run, ds),
            knowable=_knowable(run, ds),
            retrained=metrics["auc"],
            frozen=_auc(frozen, rows),
            first_day=first_day_auc(manifest, dates[0]),
            saved_bytes=saved.get("embeddings_bytes"),
            whole_bytes=saved.get("whole_copy_bytes"),
            seconds=round(sum(m.seconds for m in (manifest, manifest_of(run, ds, "features")) if m is not None), 1),
        )
        if max(result.share(result.retrained), result.share(result.frozen)) > 1:
            raise UserError(f"{ds}: an AUC above the ceiling, {result}: a model has seen what it should not")
        known[ds] = {"key": manifest.key, **asdict(result)}
        local(file).put_text(json.dumps(known, indent=1) + "\n")
        print(f"{ds}: {result.share(result.retrained):.4f}, trained once {result.share(result.frozen):.4f}", flush=True)
    return results_of(known, dates)


def results_of(known: Mapping[str, Any], dates: Sequence[str]) -> list[DayResult]:
    """Return the results of these days in a file of `measure`."""
    return [DayResult(**{k: v for k, v in known[ds].items() if k != "key"}) for ds in dates if ds in known]


def first_day_auc(manifest: Manifest, first_day: str) -> float | None:
    """Return the AUC of a day's model over the rows of the first day, by its manifest."""
    if manifest.ds == first_day:
        auc_of_day: float = manifest.facts["metrics"]["auc"]
        return auc_of_day
    forgetting: Mapping[str, Any] = manifest.facts.get("forgetting") or {}
    return forgetting.get("metrics", {}).get("auc")


def rows_of(run: RetrainRun, ds: str) -> pa.Table:
    """Return the rows of a day that happened on it, as ingest kept them."""
    log = DeltaLog(run.ws.events(PIPELINE))
    version = log.version
    files = None if version is None else log.plain_files(version)
    if files is None:
        raise UserError(f"the events table {log.folder} is missing, or has rows that only Spark can leave out")
    paths = [f.path.local_path() for f in files if ds in f.partition.values()]
    table = pa.concat_tables([pq.ParquetFile(p).read() for p in sorted(paths)])
    of_day = pc.equal(pc.strftime(table.column("ts"), format="%Y-%m-%d"), ds)
    return table.filter(of_day)


def _auc(predictor: hr.Predictor, rows: pa.Table) -> float:
    clicked = rows.column("clicked").to_numpy().astype(np.float64)
    value = auc(np.asarray(predictor.predict(rows), dtype=np.float64), clicked)
    if value is None:
        raise UserError("rows of one class alone have no AUC")
    return round(value, 6)


def _knowable(run: RetrainRun, ds: str) -> float:
    spec = run.spec()
    assert spec.generate is not None
    day = (date.fromisoformat(ds) - date.fromisoformat(spec.generate.start)).days
    value = knowable_auc(ClickModel(spec.generate, spec.table.late_days), day)
    if value is None:
        raise UserError("rows of one class alone have no AUC")
    return round(value, 6)


def ceiling_of(run: RetrainRun, ds: str) -> float:
    """Return the AUC of the true probabilities over the rows of a day."""
    ceiling = facts.number(read_truth(run.ws, PIPELINE, ds).get("auc_ceiling"))
    if ceiling is None:
        raise UserError(f"the truth of {ds} is missing: run headrace generate again")
    return ceiling


def manifest_of(run: RetrainRun, ds: str, stage: str = "train") -> Manifest | None:
    """Return the manifest of a day's stage; None: it has not run."""
    return Manifest.load(run.ws.manifest(PIPELINE, ds, stage))


def _model(run: RetrainRun, ds: str) -> Path:
    manifest = manifest_of(run, ds)
    assert manifest is not None
    return run.ws.locate(manifest.output("model").name).local_path()
