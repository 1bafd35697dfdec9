"""The training loop: the steps of a run, with evaluations and checkpoints in between.

In a step each rank runs its part of the global batch forward (embedding rows arrive by all-to-all). Its local loss is
the sum over its rows / rows of the global batch. Backward sends row gradients to their owners, one all-reduce sums the
dense gradients, and two optimizers step. The local losses of all ranks add up to the mean over the global batch. So
gradients are summed, and any number of ranks takes the same steps.

Forward and backward pass of a micro-batch run eagerly, or as one CUDA graph. A graph launches all kernels of the dense
part at once, with the memory and the shapes of its capture. So inputs are copied to that memory, and a micro-batch of
other shapes (the last of an uneven cut) runs eagerly. Lookups, whose shapes differ each time, are not in the graph:
their gradient is an output of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.comm.base import Collective
from headrace.config import Train
from headrace.dataset.loaders import TrainLoader, WithReplay
from headrace.embeddings.fused_optimizer import NonFiniteGradient
from headrace.embeddings.lookup.local_tables import bad_gradients
from headrace.errors import UserError
from headrace.models.inputs import Inputs
from headrace.models.sharded_model import PendingLookups, ShardedModel
from headrace.train.callbacks.base import Callback, CallbackList, StepEnd
from headrace.train.callbacks.progress import LoopProgress, monitor_of
from headrace.train.carried_columns import ListColumn, SampleWeights, TaskLabels
from headrace.train.checkpoint.write import CheckpointWriter
from headrace.train.evaluation.evaluate import Evaluation
from headrace.train.job import Diverged, Job, Stopped, show_metrics
from headrace.train.micro_batch import MicroBatch, prefetch_to_device
from headrace.train.optim import learning_rate
from headrace.train.setup.state import TrainState


@dataclass(frozen=True)
class Forward:
    """Result of a forward pass: the micro-batch's share of the step's mean loss, [], and its backward function."""

    loss: Tensor
    backward: Callable[[], None]


class ForwardBackward(Protocol):
    """A function that runs forward passes."""

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        """Run a forward pass. Collective: the lookups end."""


class EagerForward:
    """Eager forward passes. `batch_size`: rows of a step over all ranks."""

    def __init__(self, model: ShardedModel, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        row_values = batch.labels, batch.weights, batch.targets, batch.lists
        inputs = self._model.inputs_of(batch.continuous, lookups, *row_values)
        loss = self.loss(inputs)
        return Forward(loss.detach(), lambda: torch.autograd.backward(loss))

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the sum of the loss over the micro-batch's rows / rows of the step, []."""
        return self._model.loss(self._model.outputs(inputs), inputs) / self._batch_size


#: Function that captures the work of a function, which it calls some times, and returns a function that replays it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class GraphedForward:
    """The dense part as a graph, captured with the shapes of the first micro-batch, before there are gradients.

    If it cannot be captured, or a micro-batch has other shapes, `EagerForward` runs the pass, and the log has each
    reason once.

    Args:
        model: a model on a GPU.
        batch_size: rows of a step over all ranks.
        capture: see `Capture`; default `capture_cuda`.
        accumulate: number of micro-batches of a step.
    """

    def __init__(
        self, model: ShardedModel, batch_size: int, capture: Capture | None = None, *, accumulate: int = 1
    ) -> None:
        self._model, self._eager = model, EagerForward(model, batch_size)
        self._capture, self._accumulates = capture or capture_cuda, accumulate > 1
        self._replay: Callable[[], None] | None = None
        self._reported: set[str] = set()
        self._unsupported = ""
        if any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
            self._unsupported = "dropout draws anew in each step"
        elif getattr(model.network, "lookups", None) is not None:
            self._unsupported = "the model has lookups of its own, whose shapes differ from step to step"
        elif not model.features:
            self._unsupported = "the model has no categorical features"

    def __call__(self, batch: MicroBatch, lookups: PendingLookups) -> Forward:
        if batch.weights is not None:
            self._unsupported = self._unsupported or "train.sample_weight is no part of it"
        if batch.lists is not None:
            self._unsupported = self._unsupported or "model.loss.group is no part of it"
        if batch.targets:
            self._unsupported = self._unsupported or "train.tasks is no part of it"
        if self._replay is None and not self._unsupported:
            self._start(batch)
        reason = self._unsupported or self._shape_mismatch(batch)
        if reason or self._replay is None:
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("train.cuda_graphs: the dense part runs without a graph: %s", reason)
            return self._eager(batch, lookups)
        lookups.planned.zero_copy = False  # the graph reads vectors in its own memory
        lookups.start()
        vectors = self._model.vectors(lookups)
        assert isinstance(vectors, Tensor)
        with torch.no_grad():
            self._continuous.copy_(batch.continuous)
            self._labels.copy_(batch.labels)
            self._vectors.copy_(vectors)
        self._replay()

        def backward() -> None:
            grad = self._vectors.grad
            assert grad is not None
            self._model.add_gradient_sum(grad)
            # Tables refer to the gradient until the step, and further replays may overwrite it before.
            torch.autograd.backward(vectors, grad.clone() if self._accumulates else grad)

        return Forward(self._loss, backward)

    def _shape_mismatch(self, batch: MicroBatch) -> str:
        rows, captured = len(batch.labels), len(self._labels)
        return "" if rows == captured else f"a micro-batch of {rows} rows, captured were {captured}"

    def _start(self, batch: MicroBatch) -> None:
        device = self._model.device
        self._continuous = torch.zeros(batch.continuous.shape, device=device)
        self._labels = torch.zeros(batch.labels.shape, device=device)
        shape = len(batch.labels), self._model.features, self._model.config.embedding_dim
        self._vectors = torch.zeros(shape, device=device, requires_grad=True)
        parameters = self._model.dense_parameters()
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        try:
            self._replay = self._capture(self._dense_part)
        except RuntimeError as e:
            self._unsupported = str(e).splitlines()[0]
        for p in parameters:  # remove gradients of the runs during the capture
            assert p.grad is not None
            p.grad.zero_()

    def _dense_part(self) -> None:
        # No gradient of the vectors at first, so that each run overwrites it; gradients of parameters are added to.
        self._vectors.grad = None
        inputs = Inputs(
            self._model.inputs,
            self._continuous,
            self._vectors,
            self._labels,
            ids=_NotCaptured(),
            all_gather=_not_captured,
        )
        loss = self._eager.loss(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = loss.detach()


class _NotCaptured(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"train.cuda_graphs: the model asks for the ids of '{name}', which no graph has: set it to false"
        )

    def __contains__(self, name: object) -> bool:
        return True


def _not_captured(x: Tensor) -> Tensor:
    raise UserError("train.cuda_graphs: the model gathers over the ranks, which no graph does: set it to false")


def capture_cuda(work: Callable[[], None]) -> Callable[[], None]:
    """Capture a CUDA graph after three warm-up runs on a separate stream, in which libraries choose and allocate.

    Other threads may use the device meanwhile, to copy batches (headrace.train.micro_batch).
    """
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def micro_batches(batches: Iterable[MicroBatch], parts: int) -> Iterator[MicroBatch]:
    """Cut each batch into `parts` consecutive slices of (nearly) as many rows."""
    for batch in batches:
        rows = len(batch.labels)
        for start, end in pairwise([rows * i // parts for i in range(parts + 1)]):
            yield batch.rows(start, end)


class LookupPipeline:
    """Pipeline of micro-batches whose lookups begin one batch ahead. Its methods are collective.

    Args:
        model: model of the looked-up tables.
        batches: the micro-batches in order.
        callbacks: callbacks for the phases `data` and `lookup`.
        spans_machines: whether the ranks are on several machines.
    """

    def __init__(
        self, model: ShardedModel, batches: Iterator[MicroBatch], callbacks: CallbackList, spans_machines: bool
    ) -> None:
        self._model, self._batches, self._callbacks, self._spans_machines = model, batches, callbacks, spans_machines
        self._ahead: tuple[MicroBatch, PendingLookups] | None = None

    def next(self, *, has_following: bool) -> tuple[MicroBatch, PendingLookups]:
        """Return the next micro-batch; the ids of the one after it are sent, if there is one."""
        current = self._ahead or self._begin()
        self._ahead = self._begin() if has_following else None
        return current

    def _begin(self) -> tuple[MicroBatch, PendingLookups]:
        """Take a micro-batch and send its ids to the owners of their rows, who answer while this rank computes."""
        with self._callbacks.phase("data"):
            batch = next(self._batches)
        with self._callbacks.phase("lookup"):
            return batch, self._model.prepare(batch.categorical)

    def fetch_rows(self, *, of_next_step: bool) -> None:
        """Request the rows of the micro-batch ahead; those of the next step only if this step does not change them.

        Rows of the next step are requested early only on several machines, to hide the network's time. Within one
        machine, sorting rows into early and late ones takes more time of the cores than it saves.
        """
        if self._ahead is not None:
            if not of_next_step:
                self._ahead[1].start()
            elif self._spans_machines:
                self._ahead[1].prefetch()

    def drop(self) -> None:
        """Receive requested rows that are not needed any more: no message may be in flight when ranks end."""
        if self._ahead is not None:
            self._ahead[1].drop()
            self._ahead = None


def bad_step(
    step: int, local_loss: float, state: TrainState, collective: Collective, train: Train, tables: Sequence[str] = ()
) -> Diverged:
    """Return the error of a step whose loss or gradient is NaN or infinite on some rank. Collective: the same on all
    ranks.

    Args:
        step: number of the step.
        local_loss: this rank's part of the loss.
        state: state with the gradients of the step; the dense ones are reduced.
        collective: the ranks.
        train: settings that the message names.
        tables: tables of this rank that are known to be at fault.
    """
    loss = float(collective.all_gather(torch.tensor([local_loss], dtype=torch.float64)).sum())
    parameters = [
        n for n, p in state.model.named_dense_parameters() if p.grad is not None and not p.grad.isfinite().all()
    ]
    of_tables = sorted({*tables, *bad_gradients(state.model.embeddings)})
    named = [f"table '{t}'" for t in _of_all_ranks(of_tables, collective)] + [f"'{n}'" for n in parameters]
    if not torch.tensor(loss).isfinite():
        fault = f"the loss is {loss}"
    else:
        fault = f"the gradient of {', '.join(named) or 'the interaction'} is not finite"
    return Diverged(
        f"training diverged: {fault} at step {step}. Lower train.embeddings.learning_rate "
        f"({train.embeddings.learning_rate}) or train.dense.learning_rate ({train.dense.learning_rate}), or tame "
        f"extreme values of continuous features with clip, log and normalize in features.workflow",
        step,
    )


def _of_all_ranks(names: Sequence[str], collective: Collective) -> list[str]:
    text = "".join(f"{name}\n" for name in names).encode()
    gathered = collective.all_gather(torch.tensor(list(text), dtype=torch.int64))
    return sorted(set(bytes(gathered.tolist()).decode().splitlines()))


log = logging.getLogger("headrace.train")


class Trainer:
    """Trainer for the steps from `progress.step` to `total_steps`. Collective: every rank creates one and calls `fit`.

    Args:
        job: settings and folders of the run.
        state: state that is trained in place.
        source: this rank's rows of each step, from `progress.step` on.
        progress: progress that is updated in place.
        total_steps: number of the last step.
        collective: the ranks.
        evaluate: evaluates the model on the split `valid`, by all ranks.
        callbacks: callbacks for phases, steps and evaluations, called in this order.
        stop_requested: returns whether this rank was asked to stop; all ranks then stop after the same step.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState,
        source: TrainLoader | WithReplay,
        progress: LoopProgress,
        total_steps: int,
        collective: Collective,
        evaluate: Callable[[], Evaluation],
        *,
        callbacks: Sequence[Callback] = (),
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job, self._state, self._progress, self._total_steps = job, state, progress, total_steps
        self._collective, self._evaluate, self._stop_requested = collective, evaluate, stop_requested
        self._callbacks, self._steps_per_epoch = CallbackList(callbacks), source.steps_per_epoch
        model, train, world = state.model, job.train, collective.world
        self._monitor = monitor_of(train, model.predicts)
        weights = SampleWeights(train, model.schema, job.decay)
        labels = TaskLabels(train, model.schema, job.ds)
        lists = ListColumn.from_spec(job.model, train, model.schema)
        sent = prefetch_to_device(source, model.device, weights=weights, labels=labels, lists=lists)
        batches = micro_batches(sent, train.accumulate)
        self.lookups = LookupPipeline(model, batches, self._callbacks, world.local_size < world.size)
        self._forward: ForwardBackward = (
            GraphedForward(model, train.batch_size, accumulate=train.accumulate)
            if train.cuda_graphs
            else EagerForward(model, train.batch_size)
        )
        self._writer = CheckpointWriter(
            job.checkpoints,
            collective,
            config=job.config_fingerprint,
            keep=train.keep,
            check_fence=job.check_fence,
            token=job.token,
            background=train.background_checkpoints,
            lag=max(1, train.checkpoint_steps // 4),
        )

    @property
    def checkpoint_wait_seconds(self) -> float:
        """Seconds for which the loop waited for checkpoints."""
        return self._writer.wait_seconds

    def fit(self) -> Evaluation | None:
        """Run the steps. Return the last evaluation, if it is of the last step.

        Raises:
            Diverged: the loss or a gradient is not finite, and the step is not applied; or weights to save are not.
            Stopped: a rank was asked to stop; a checkpoint of the last step was written.
        """
        try:
            return self._fit()
        except BaseException:
            self._writer.abandon()
            raise

    def _fit(self) -> Evaluation | None:
        train, progress, phase = self._job.train, self._progress, self._callbacks.phase
        start, seconds_before = time.perf_counter(), progress.seconds
        evaluation = None
        self._state.model.train()
        while progress.step < self._total_steps and not progress.has_stalled(train.patience, self._monitor):
            with phase("step"):
                rates = self._learning_rates(progress.step + 1)
                loss, stop = self._train_step(progress.step + 1, rates)
                progress.step += 1
                progress.seconds = seconds_before + time.perf_counter() - start
                epoch = -(-progress.step // self._steps_per_epoch)
                self._callbacks.on_step_end(StepEnd(progress.step, epoch, loss, rates))
            is_last = progress.step == self._total_steps
            epoch_ends = progress.step % self._steps_per_epoch == 0
            evaluates = epoch_ends or is_last or bool(train.eval_steps and progress.step % train.eval_steps == 0)
            if evaluates:
                with phase("evaluate"):
                    evaluation = self._evaluate()
                self._state.model.train()
                self._note_evaluation(epoch, evaluation)
                progress.seconds = seconds_before + time.perf_counter() - start
            may_be_best = evaluates and train.patience is not None
            if progress.step % train.checkpoint_steps == 0 or is_last or may_be_best or stop:
                with phase("checkpoint"):
                    self._writer.save(
                        self._state.model, self._state.dense, progress, keep_step=progress.best_step(self._monitor)
                    )
            self._writer.poll(progress.step)
            if stop and not is_last:
                self.lookups.drop()
                self._writer.finish()
                raise Stopped(progress.step, self._total_steps)
        self.lookups.drop()
        self._writer.finish()
        return evaluation if progress.evaluated_step == progress.step else None

    def _train_step(self, step: int, rates: dict[str, float]) -> tuple[float, bool]:
        """Run one step over this rank's rows.

        Returns:
            mean loss of the global batch before the step; and whether any rank was asked to stop.
        """
        train, state, phase = self._job.train, self._state, self._callbacks.phase
        # Seed by the step, so that dropout of a resumed run draws the same numbers.
        torch.manual_seed((train.seed * 1_000_003 + step - 1) * 1_009 + self._collective.world.rank)
        state.model.begin_step(step)
        local_loss = 0.0
        for i in range(train.accumulate):
            is_last = i + 1 == train.accumulate
            batch, lookups = self.lookups.next(has_following=not is_last or step < self._total_steps)
            with phase("dense forward"):
                forward = self._forward(batch, lookups)
                local_loss += float(forward.loss)
            with phase("lookup"):
                self.lookups.fetch_rows(of_next_step=is_last)
            with phase("dense backward"):
                forward.backward()
        finite = state.model.take_gradient_sum()
        loss, stop = state.dense.reduce(local_loss, self._stop_requested(), finite)
        # All ranks have the same sums, so either all of them raise here, or none.
        if not (math.isfinite(loss) and state.dense.has_finite_gradients()):
            self.lookups.drop()
            raise bad_step(step, local_loss, state, self._collective, train)
        with phase("optimizer"):
            try:
                state.model.step_embeddings(rates["embeddings_rate"])  # first, since clipping may raise Diverged
            except NonFiniteGradient as e:
                self.lookups.drop()
                raise bad_step(step, local_loss, state, self._collective, train, e.tables) from e
            state.dense.step(rates["dense_rate"])
        return loss, stop

    def _learning_rates(self, step: int) -> dict[str, float]:
        train, total = self._job.train, self._total_steps
        return {
            "dense_rate": learning_rate(train.dense, step, total),
            "embeddings_rate": learning_rate(train.embeddings, step, total),
        }

    def _note_evaluation(self, epoch: int, evaluation: Evaluation) -> None:
        step, metrics = self._progress.step, evaluation.metrics
        names = ("auc", "log_loss", self._monitor.metric)
        record: dict[str, float | None] = {"epoch": epoch, "step": step}
        record |= {name: metrics[name] for name in dict.fromkeys(names) if name in metrics}
        self._progress.evals.append(record)
        if self._collective.world.is_chief:
            log.info("epoch %d of %d, step %d: %s", epoch, self._job.train.epochs, step, show_metrics(metrics))
        self._callbacks.on_evaluation_end(step, epoch, metrics)
