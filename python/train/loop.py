"""The training loop: one function that every rank runs, read from top to bottom.

A step: the rank's part of the global batch forward (embedding rows come by all-to-all), local loss = sum over its rows
/ rows of the global batch, backward (row gradients go back to their owners), one all-reduce of the dense gradients,
two optimizers. The sum over ranks of local losses is the mean over the global batch, so gradients are summed, and any
number of ranks takes the same steps.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from headrace.dataset.layout import SplitLayout, open_split
from headrace.dataset.source import TrainSource
from headrace.embeddings.collective import Collective, LocalCollective
from headrace.embeddings.plan import Lookup, Plan, Table
from headrace.embeddings.planner import plan_tables
from headrace.models import saved
from headrace.models.dlrm import DLRM
from headrace.schema import DatasetSchema
from headrace.train import checkpoint
from headrace.train.checkpoint import Progress
from headrace.train.dense import DenseOptimizer
from headrace.train.evaluate import Evaluation, evaluate_clicks, evaluate_ranking, predict_split
from headrace.train.job import Diverged, Job, Report, list_steps
from headrace.train.metrics import show_metrics
from headrace.train.progress import Tick

log = logging.getLogger("headrace.train")
#: Points of the learning curve.
_CURVE_POINTS = 100

#: Takes the chief's progress.
Say = Callable[[Tick], None]


@dataclass
class _Learner:
    """The model and its two optimizers."""

    model: DLRM
    dense: DenseOptimizer


def train_local(job: Job, say: Say = lambda tick: None) -> Report:
    """Train in this process, as the only rank."""
    return train(job, LocalCollective(), say)


def train(job: Job, collective: Collective, say: Say = lambda tick: None) -> Report:
    """Train, evaluate and save the model. Collective; every rank returns the same report, its own peak memory apart.

    Goes on from the newest whole checkpoint of the same run, so that it ends with the weights of a run that was never
    interrupted (bit for bit on as many ranks and threads).

    Raises:
        Diverged: the loss is not finite.
        UserError: the dataset, a checkpoint or the warm-start model cannot be used.
    """
    dataset, schema = job.ws.home / job.features.output("dataset").name, job.features.dataset_schema
    assert schema is not None
    layout = open_split(dataset, "train", schema)
    learner = _new_learner(job, schema, collective)
    resumed = checkpoint.restore(job.checkpoints, learner.model, learner.dense, collective, config=job.obeyed)
    if resumed is None:
        if list_steps(job.checkpoints):
            learner = _new_learner(job, schema, collective)
        if job.warm_start is not None:
            saved.restore(learner.model, job.warm_start, saved.has_state_of(job.warm_start, job.train.embeddings.kind))
            learner.model.embeddings.age_state(job.train.warm_decay)
    warm = str(job.warm_start) if job.warm_start is not None else None
    progress = resumed or Progress()
    resumed_from = progress.step
    valid = open_split(dataset, "valid", schema)

    with TrainSource(layout, schema, job.train, collective.world, start_step=progress.step) as source:
        total = source.steps_per_epoch * job.train.epochs
        total = min(total, job.train.max_steps or total)
        if collective.world.is_chief and progress.step < total:
            log.info(
                "%s rows an epoch, %d steps of %d rows on %d rank(s)%s", f"{source.rows:,}", total,
                job.train.batch_size, collective.world.size,
                f", going on from step {progress.step}" if progress.step else "",
            )  # fmt: skip
        evaluation = _steps(job, learner, source, progress, total, collective, valid, schema, say)
        rows, per_epoch, waited = source.rows, source.steps_per_epoch, source.wait_seconds

    total = progress.step
    say(Tick(phase="evaluate", step=total, total=total))
    best_step = progress.step
    if job.train.patience is not None and progress.best_step not in (None, progress.step):
        assert progress.best_step is not None
        best_step, evaluation = progress.best_step, None
        if collective.world.is_chief:
            log.info("taking the weights of step %d, which had the lowest log loss", best_step)
        checkpoint.restore_step(job.checkpoints, best_step, learner.model, learner.dense, collective, config=job.obeyed)
    if evaluation is None:  # other weights than those of the last step; or all steps were taken before this run began
        evaluation = _evaluate(job, learner.model, valid, schema, collective)
    metrics = dict(evaluation.metrics)
    sizes = {"train": rows, "valid": evaluation.rows}
    if job.train.rank_group is not None:
        ranked = open_split(dataset, "rank", schema, [schema.carried_name(job.train.rank_group)])
        sizes["rank"] = ranked.rows
        metrics |= _rank(job, learner.model, ranked, schema, collective)
    say(Tick(phase="save", step=total, total=total))
    _save(job, learner, dataset, metrics, collective)
    return Report(
        rows=sizes, steps=total, steps_per_epoch=per_epoch, resumed_from_step=resumed_from, warm_start=warm,
        metrics=metrics, curve=progress.curve, evals=progress.evals, best_step=best_step,
        calibration_bins=evaluation.calibration_bins, data_wait_seconds=round(waited, 3),
        peak_memory_mib={f"rank{collective.world.rank}": peak_mib()},
    )  # fmt: skip


def _new_learner(job: Job, schema: DatasetSchema, collective: Collective) -> _Learner:
    def make_plan(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
        return plan_tables(
            tables, lookups, world_size, batch_size=job.train.batch_size, optimizer=job.train.embeddings.kind,
            settings=job.train.sharding,
        ).plan  # fmt: skip

    model = DLRM(schema, job.model, collective, job.train.seed, make_plan)
    model.embeddings.configure_optimizer(job.train.embeddings)
    return _Learner(model, DenseOptimizer(model.dense_parameters(), job.train.dense, collective))


def _steps(
    job: Job, learner: _Learner, source: TrainSource, progress: Progress, total: int, collective: Collective,
    valid: SplitLayout, schema: DatasetSchema, say: Say,
) -> Evaluation | None:  # fmt: skip
    """Take the steps from `progress.step` to `total`, evaluating and saving on the way. Returns the last evaluation."""
    evaluation = None
    every = max(1, total // _CURVE_POINTS)
    first, began, before = progress.step, time.perf_counter(), progress.seconds
    meter = _Meter(progress, job.train.batch_size)
    said = 0.0
    saver = checkpoint.Saver(
        job.checkpoints, collective, config=job.obeyed, keep=job.train.keep, may_commit=job.check_fence,
        background=job.train.background_checkpoints, lag=max(1, job.train.checkpoint_steps // 4),
    )  # fmt: skip
    learner.model.train()
    while progress.step < total and not progress.has_stalled(job.train.patience):
        batch = next(source)
        if job.model.dropout:
            # The mask is a function of the step, so that a resumed run draws the same ones.
            torch.manual_seed((job.train.seed * 1_000_003 + progress.step) * 1_009 + collective.world.rank)
        loss = _step(learner, torch.from_numpy(batch.continuous), torch.from_numpy(batch.codes),
                     torch.from_numpy(batch.labels), job, progress.step + 1)  # fmt: skip
        progress.step += 1
        progress.seconds = before + time.perf_counter() - began
        meter.add(loss)
        epoch_ends = progress.step % source.steps_per_epoch == 0
        epoch = -(-progress.step // source.steps_per_epoch)
        if progress.step % every == 0 or progress.step == total:
            meter.close_point(epoch)
        now = time.perf_counter()
        if now - said >= job.progress_seconds or progress.step in (first + 1, total):
            said = now
            taken = progress.step - first
            left = (total - progress.step) * (now - began) / taken
            say(Tick(phase="train", step=progress.step, total=total, epoch=epoch, epochs=job.train.epochs, loss=loss,
                     samples_per_s=taken * job.train.batch_size / (now - began), seconds_left=left))  # fmt: skip
        if epoch_ends or progress.step == total:
            evaluation = _evaluate(job, learner.model, valid, schema, collective)
            found = evaluation.metrics
            progress.evals.append(
                {"epoch": epoch, "step": progress.step, "auc": found["auc"], "log_loss": found["log_loss"]}
            )
            learner.model.train()
            if collective.world.is_chief:
                log.info("epoch %d of %d: %s", epoch, job.train.epochs, show_metrics(found))
            say(Tick(phase="evaluated", step=progress.step, total=total, epoch=epoch, metrics=found))
            progress.seconds = before + time.perf_counter() - began
            meter.restart()
        may_be_best = epoch_ends and job.train.patience is not None
        if progress.step % job.train.checkpoint_steps == 0 or progress.step == total or may_be_best:
            saver.save(learner.model, learner.dense, progress, keep_step=progress.best_step)
            meter.restart()
        saver.poll(progress.step)
    saver.finish()
    return evaluation


def _step(learner: _Learner, continuous: Tensor, codes: Tensor, labels: Tensor, job: Job, step: int) -> float:
    """One step over this rank's rows. Returns the global batch's mean loss, before the step."""
    logits = learner.model(continuous, codes)
    local = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / job.train.batch_size
    torch.autograd.backward(local)
    loss = learner.dense.reduce(local)
    if not math.isfinite(loss):
        # Every rank sees the same sum, so every rank leaves here.
        raise Diverged(
            f"training diverged: the loss is {loss} at step {step}. Lower train.embeddings.learning_rate "
            f"({job.train.embeddings.learning_rate}) or train.dense.learning_rate ({job.train.dense.learning_rate}), "
            f"or tame extreme values of continuous features with clip, log and normalize in features.workflow"
        )
    learner.dense.step()
    learner.model.embeddings.step()
    return loss


class _Meter:
    """Mean loss and speed since the last point of the curve; evaluations and checkpoints do not count as time.

    The sums are in `progress`, so that a checkpoint between two points loses nothing.
    """

    def __init__(self, progress: Progress, batch_size: int) -> None:
        self._progress, self._batch_size = progress, batch_size
        self.restart()

    def restart(self) -> None:
        self._tick = time.perf_counter()

    def add(self, loss: float) -> None:
        now = time.perf_counter()
        self._progress.open_seconds += now - self._tick
        self._progress.open_loss += loss
        self._progress.open_steps += 1
        self._tick = now

    def close_point(self, epoch: int) -> None:
        """Add a point to the curve."""
        p = self._progress
        speed = p.open_steps * self._batch_size / max(p.open_seconds, 1e-9)
        p.curve.append(
            {"step": p.step, "epoch": epoch, "loss": p.open_loss / p.open_steps, "samples_per_s": round(speed, 1),
             "seconds": round(p.seconds, 3)}
        )  # fmt: skip
        p.open_loss, p.open_steps, p.open_seconds = 0.0, 0, 0.0


def _evaluate(job: Job, model: DLRM, layout: SplitLayout, schema: DatasetSchema, collective: Collective) -> Evaluation:
    model.eval()
    return evaluate_clicks(
        predict_split(model, layout, schema, collective, batch_size=job.train.batch_size, streams=job.train.streams)
    )


def _rank(
    job: Job, model: DLRM, layout: SplitLayout, schema: DatasetSchema, collective: Collective
) -> dict[str, float]:
    assert job.train.rank_group is not None
    model.eval()
    return evaluate_ranking(
        predict_split(model, layout, schema, collective, batch_size=job.train.batch_size, streams=job.train.streams,
                      group=schema.carried_name(job.train.rank_group)), job.train.rank_k,
    )  # fmt: skip


def _save(job: Job, learner: _Learner, dataset: Path, metrics: dict[str, float | None], collective: Collective) -> None:
    if collective.world.is_chief:
        job.check_fence()
    saved.save_model(
        job.saved_model, learner.model, workflow=dataset / "workflow", pipeline=job.pipeline, ds=job.ds, key=job.key,
        metrics=metrics,
    )  # fmt: skip


def peak_mib() -> float:
    """Peak resident size of this process, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
