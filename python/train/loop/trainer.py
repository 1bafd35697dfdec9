"""The steps of a run, from the first to the last: batches in, weights changed, evaluated and saved on the way."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from headrace.comm.base import Collective
from headrace.dataset.loader.source import TrainSource
from headrace.models.dlrm import DLRM, Begun
from headrace.train.callbacks.metrics_log import Journal
from headrace.train.callbacks.progress import Tick
from headrace.train.callbacks.tracing import Spans
from headrace.train.callbacks.watchdog import Watch
from headrace.train.checkpoint import write as checkpoint
from headrace.train.checkpoint.write import Progress
from headrace.train.evaluation.metrics import show_metrics
from headrace.train.evaluation.predict import Evaluation
from headrace.train.job import Diverged, Job, Stopped
from headrace.train.loop.forward_backward import Eager, Graphed, Passes
from headrace.train.loop.prefetch import Part, feed
from headrace.train.optim.dense import DenseOptimizer
from headrace.train.optim.schedule import share

log = logging.getLogger("headrace.train")
#: Points of the learning curve.
_CURVE_POINTS = 100

#: Takes the chief's progress.
Say = Callable[[Tick], None]


@dataclass
class Learner:
    """The model and its two optimizers."""

    model: DLRM
    dense: DenseOptimizer


class Loop:
    """Takes the steps from `progress.step` to `total`. Collective: every rank makes one and calls `run`.

    Args:
        job: what the ranks were told.
        learner: is trained in place.
        source: gives this rank's rows of each step, from `progress.step` on.
        progress: is moved on in place.
        total: the last step.
        collective: the ranks.
        evaluate: the model over the split `valid`, by all ranks.
        say: takes the chief's progress.
        spans: notes where the time goes.
        watch: is told the step, and knows whether to stop.
    """

    def __init__(
        self,
        job: Job,
        learner: Learner,
        source: TrainSource,
        progress: Progress,
        total: int,
        collective: Collective,
        evaluate: Callable[[], Evaluation],
        *,
        say: Say,
        spans: Spans,
        watch: Watch,
    ) -> None:
        self._job, self._learner, self._source, self._progress, self._total = job, learner, source, progress, total
        self._collective, self._evaluate, self._say, self._spans, self._watch = collective, evaluate, say, spans, watch
        self._journal = Journal(job.journal if collective.world.is_chief else None, progress.step)
        self._parts = self._cut()
        rows = job.train.batch_size
        self._pass: Passes = Graphed(learner.model, rows) if job.train.cuda_graphs else Eager(learner.model, rows)
        #: The part that comes next, and the lookup of its rows, which has begun.
        self._next: tuple[Part, Begun] | None = None
        self._first, self._began, self._before = progress.step, time.perf_counter(), progress.seconds
        self._said = 0.0
        world = collective.world
        self._is_apart = world.local_size < world.size

    def run(self) -> Evaluation | None:
        """Take the steps. Returns the last evaluation, where it is of the last step.

        Raises:
            Diverged: the loss is not finite.
            Stopped: a rank was asked to stop; a checkpoint of the last step was written.
        """
        job, progress, train = self._job, self._progress, self._job.train
        every = max(1, self._total // _CURVE_POINTS)
        meter = Meter(progress, train.batch_size)
        saver = checkpoint.Saver(
            job.checkpoints,
            self._collective,
            config=job.obeyed,
            keep=train.keep,
            may_commit=job.check_fence,
            background=train.background_checkpoints,
            lag=max(1, train.checkpoint_steps // 4),
        )
        evaluation = None
        self._learner.model.train()
        while progress.step < self._total and not progress.has_stalled(train.patience):
            self._watch.doing = "train"
            with self._spans.span("step"):
                loss, stop = self._step(progress.step + 1)
                progress.step += 1
                self._watch.step = progress.step
                progress.seconds = self._before + time.perf_counter() - self._began
                meter.add(loss)
                epoch_ends = progress.step % self._source.steps_per_epoch == 0
                epoch = -(-progress.step // self._source.steps_per_epoch)
                is_last = progress.step == self._total
                if progress.step % every == 0 or is_last:
                    self._journal.write("train", meter.close_point(epoch) | self._rates(progress.step))
                self._tell(epoch, loss)
            evaluated = epoch_ends or is_last or (train.eval_steps and progress.step % train.eval_steps == 0)
            if evaluated:
                evaluation = self._look(epoch)
                meter.restart()
            may_be_best = evaluated and train.patience is not None
            if progress.step % train.checkpoint_steps == 0 or is_last or may_be_best or stop:
                self._watch.doing = "checkpoint"
                with self._spans.span("checkpoint"):
                    saver.save(self._learner.model, self._learner.dense, progress, keep_step=progress.best_step)
                meter.restart()
            saver.poll(progress.step)
            if stop and not is_last:
                self._drain()
                saver.finish()
                raise Stopped(progress.step, self._total)
        self._drain()
        saver.finish()
        return evaluation if evaluated_at(progress) == progress.step else None

    def _cut(self) -> Iterator[Part]:
        """The source's batches, each in `accumulate` parts."""
        parts = self._job.train.accumulate
        for whole in feed(self._source, next(iter(self._learner.model.dense_parameters())).device):
            rows = len(whole.labels)
            for start, end in pairwise([rows * i // parts for i in range(parts + 1)]):
                yield whole.rows(start, end)

    def _begin_next(self) -> None:
        """Take the next part and send its ids to the owners of their rows, who answer while we compute."""
        with self._spans.span("data"):
            part = next(self._parts)
        with self._spans.span("lookup"):
            self._next = part, self._learner.model.prepare(part.codes)

    def _fetch_next(self, step_ends: bool) -> None:
        """Ask for the next part's rows: all of them where it is the same step's, else those that the step leaves alone.

        The latter only where a network's time can be hidden so: inside one machine, sorting rows into early and late
        ones takes more of the cores that compute than it saves.
        """
        if self._next is not None:
            if not step_ends:
                self._next[1].start()
            elif self._is_apart:
                self._next[1].fetch_ahead()

    def _drain(self) -> None:
        """Receive what was asked for and is not wanted any more: no message may be under way when ranks part."""
        if self._next is not None:
            self._next[1].drop()
            self._next = None

    def _step(self, step: int) -> tuple[float, bool]:
        """One step over this rank's rows.

        Returns:
            The global batch's mean loss, before the step; whether any rank was asked to stop.
        """
        job, learner, spans = self._job, self._learner, self._spans
        if job.model.dropout:
            # The mask is a function of the step, so that a resumed run draws the same ones.
            torch.manual_seed((job.train.seed * 1_000_003 + step - 1) * 1_009 + self._collective.world.rank)
        local = 0.0
        for i in range(job.train.accumulate):
            if self._next is None:
                self._begin_next()
            assert self._next is not None
            part, prepared = self._next
            self._next = None
            is_last = i + 1 == job.train.accumulate
            if not is_last or step < self._total:
                self._begin_next()
            with spans.span("dense forward"):
                made = self._pass(part, prepared)
                local += float(made.loss)
            with spans.span("lookup"):
                self._fetch_next(is_last)
            with spans.span("dense backward"):
                made.backward()
        total, stop = learner.dense.reduce(local, self._watch.is_asked_to_stop)
        if not math.isfinite(total):
            # Every rank sees the same sum, so every rank leaves here.
            self._drain()
            raise Diverged(
                f"training diverged: the loss is {total} at step {step}. Lower train.embeddings.learning_rate "
                f"({job.train.embeddings.learning_rate}) or train.dense.learning_rate "
                f"({job.train.dense.learning_rate}), or tame extreme values of continuous features with clip, log and "
                f"normalize in features.workflow",
                step,
            )
        with spans.span("optimizer"):
            rates = self._rates(step)
            learner.dense.step(rates["dense_rate"])
            learner.model.step_embeddings(rates["embeddings_rate"])
        return total, stop

    def _rates(self, step: int) -> dict[str, float]:
        """The learning rates of a step."""
        train = self._job.train
        return {
            "dense_rate": train.dense.learning_rate * share(train.dense.schedule, step, self._total),
            "embeddings_rate": train.embeddings.learning_rate * share(train.embeddings.schedule, step, self._total),
        }

    def _tell(self, epoch: int, loss: float) -> None:
        job, step = self._job, self._progress.step
        now = time.perf_counter()
        if now - self._said >= job.progress_seconds or step in (self._first + 1, self._total):
            self._said = now
            taken, seconds = step - self._first, now - self._began
            self._say(
                Tick(
                    phase="train",
                    step=step,
                    total=self._total,
                    epoch=epoch,
                    epochs=job.train.epochs,
                    loss=loss,
                    samples_per_s=taken * job.train.batch_size / seconds,
                    seconds_left=(self._total - step) * seconds / taken,
                )
            )

    def _look(self, epoch: int) -> Evaluation:
        """Evaluate and note what was found."""
        progress = self._progress
        self._watch.doing = "evaluate"
        with self._spans.span("evaluate"):
            evaluation = self._evaluate()
        found = evaluation.metrics
        progress.evals.append(
            {"epoch": epoch, "step": progress.step, "auc": found["auc"], "log_loss": found["log_loss"]}
        )
        self._journal.write("eval", {"step": progress.step, "epoch": epoch, **found})
        self._say(Tick(phase="evaluated", step=progress.step, total=self._total, epoch=epoch, metrics=found))
        self._learner.model.train()
        if self._collective.world.is_chief:
            log.info("epoch %d of %d, step %d: %s", epoch, self._job.train.epochs, progress.step, show_metrics(found))
        self._say(Tick(phase="evaluated", step=progress.step, total=self._total, epoch=epoch, metrics=found))
        progress.seconds = self._before + time.perf_counter() - self._began
        return evaluation


def evaluated_at(progress: Progress) -> int | None:
    """The step of the last evaluation."""
    return int(progress.evals[-1]["step"] or 0) if progress.evals else None


class Meter:
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

    def close_point(self, epoch: int) -> dict[str, float]:
        """Add a point to the curve; it is returned, too."""
        p = self._progress
        speed = p.open_steps * self._batch_size / max(p.open_seconds, 1e-9)
        point = {
            "step": p.step,
            "epoch": epoch,
            "loss": p.open_loss / p.open_steps,
            "samples_per_s": round(speed, 1),
            "seconds": round(p.seconds, 3),
        }
        p.curve.append(point)
        p.open_loss, p.open_steps, p.open_seconds = 0.0, 0, 0.0
        return point
