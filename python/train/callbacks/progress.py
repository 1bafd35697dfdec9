"""Progress of a run: state and history of the loop, and the progress that rank 0 writes and the driver shows.

Rank 0 writes to a file, since Horovod forwards standard output of ranks in blocks of 64 KiB, which may take minutes.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal, NamedTuple, TextIO

from pydantic import BaseModel, ConfigDict, Field

from headrace.config import Spec, Train
from headrace.logs import redact
from headrace.storage import Location
from headrace.train.callbacks.base import Callback, StepEnd
from headrace.train.job import Job


class Monitor(NamedTuple):
    """The metric by which the best evaluation is chosen."""

    metric: str
    #: Whether a lower value is better.
    falls: bool

    @property
    def best(self) -> str:
        """Text such as `lowest log loss`."""
        return f"{'lowest' if self.falls else 'highest'} {self.metric.replace('_', ' ')}"


LOG_LOSS = Monitor("log_loss", True)


def monitor_of(train: Train, predicts: str) -> Monitor:
    """Return `train.monitor`; in place of log loss, rmse for a model of numbers, AUC for one that only orders rows.

    Args:
        train: settings of the run.
        predicts: see `ShardedModel.predicts`.
    """
    if predicts == "number":
        return Monitor("mae" if train.monitor == "mae" else "rmse", True)
    if predicts == "order" and train.monitor == LOG_LOSS.metric:
        return Monitor("auc", False)
    return Monitor(train.monitor, train.monitor_falls)


def spec_monitor(spec: Spec) -> Monitor:
    """Return `monitor_of` the neural model of a spec, from what the spec alone tells about its predictions."""
    if spec.model.loss is not None:
        return monitor_of(spec.train, spec.model.loss.predicts)
    return monitor_of(spec.train, "number" if spec.features.label_type == "number" else "probability")


class LoopProgress(BaseModel):
    """Position and history of the training loop."""

    model_config = ConfigDict(extra="forbid")

    #: Number of completed steps.
    step: int = 0
    #: Seconds of training, over all runs.
    seconds: float = 0.0
    #: Sum of losses, steps and seconds since the last point of the curve.
    open_loss: float = 0.0
    open_steps: int = 0
    open_seconds: float = 0.0
    curve: list[dict[str, float]] = Field(default_factory=list)
    evals: list[dict[str, float | None]] = Field(default_factory=list)

    def best(self, monitor: Monitor = LOG_LOSS) -> int | None:
        """Return the index in `evals` of the best evaluation, of equals the first; None without evaluations."""
        values = [e.get(monitor.metric) for e in self.evals]
        worst_first = [math.inf if v is None else v if monitor.falls else -v for v in values]
        return worst_first.index(min(worst_first)) if worst_first else None

    def best_step(self, monitor: Monitor = LOG_LOSS) -> int | None:
        """Return the step of the best evaluation."""
        best = self.best(monitor)
        return None if best is None else int(self.evals[best]["step"] or 0)

    @property
    def evaluated_step(self) -> int | None:
        """The step of the last evaluation."""
        return int(self.evals[-1]["step"] or 0) if self.evals else None

    def has_stalled(self, patience: int | None, monitor: Monitor = LOG_LOSS) -> bool:
        """Return True if the last `patience` evaluations did not improve on the one before them."""
        best = self.best(monitor)
        return patience is not None and best is not None and len(self.evals) - 1 - best >= patience


log = logging.getLogger("headrace.train")
_BAR = 24
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of the run, as rank 0 reports it."""

    #: evaluated: an evaluation during training, on the split `valid`, with `metrics`; evaluate: that at the end.
    phase: Literal["train", "evaluated", "evaluate", "save"]
    step: int = 0
    total: int = 0
    epoch: int = 0
    epochs: int = 0
    #: Mean loss of the last step's global batch.
    loss: float = 0.0
    #: Mean since this run began, evaluations and checkpoints included.
    samples_per_s: float = 0.0
    seconds_left: float = 0.0
    metrics: dict[str, float | None] | None = None


#: Function that receives rank 0's progress.
OnProgress = Callable[[ProgressEvent], None]


class ProgressReporter(Callback):
    """Reporter of the loop's progress at the first and last step, and at most every `job.progress_seconds`.

    Args:
        on_progress: receives the progress.
        job: the run.
        first_step: steps that were completed before the loop began.
        total_steps: steps of the run.
    """

    def __init__(self, on_progress: OnProgress, job: Job, first_step: int, total_steps: int) -> None:
        self._on_progress, self._job, self._first_step, self._total_steps = on_progress, job, first_step, total_steps
        self._start, self._reported = time.perf_counter(), 0.0

    def on_step_end(self, step: StepEnd) -> None:
        now = time.perf_counter()
        is_due = now - self._reported >= self._job.progress_seconds
        if not is_due and step.step not in (self._first_step + 1, self._total_steps):
            return
        self._reported = now
        steps, seconds = step.step - self._first_step, now - self._start
        self._on_progress(
            ProgressEvent(
                phase="train",
                step=step.step,
                total=self._total_steps,
                epoch=step.epoch,
                epochs=self._job.train.epochs,
                loss=step.loss,
                samples_per_s=steps * self._job.train.batch_size / seconds,
                seconds_left=(self._total_steps - step.step) * seconds / steps,
            )
        )

    def on_evaluation_end(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        event = ProgressEvent(phase="evaluated", step=step, total=self._total_steps, epoch=epoch, metrics=dict(metrics))
        self._on_progress(event)


def show(event: ProgressEvent) -> str:
    """Return the progress as a line of text."""
    if event.phase == "evaluate":
        return "evaluating"
    if event.phase == "save":
        return "saving the model"
    filled = _BAR * event.step // max(1, event.total)
    minutes, seconds = divmod(round(event.seconds_left), 60)
    return (
        f"[{'#' * filled}{'.' * (_BAR - filled)}] epoch {event.epoch}/{event.epochs}  step {event.step}/{event.total}  "
        f"loss {event.loss:.4f}  {event.samples_per_s:,.0f} samples/s  {minutes}:{seconds:02d} left"
    )


class ProgressWriter(logging.Handler):
    """Writer of rank 0's progress and, as a logging handler, of its log lines: one JSON object a line."""

    def __init__(self, path: Location) -> None:
        super().__init__()
        self._path = path

    def write(self, event: ProgressEvent) -> None:
        self._write({"progress": asdict(event)})

    def emit(self, record: logging.LogRecord) -> None:
        self._write({"text": redact(record.getMessage()), "level": record.levelno})

    def _write(self, message: dict[str, object]) -> None:
        self._path.append((json.dumps(message) + "\n").encode())


class ProgressBar:
    """Progress for users: on a terminal a bar that is rewritten, elsewhere a log line every `every` seconds."""

    def __init__(self, out: TextIO | None = None, every: float = 5.0) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._every = every
        self._last_line = -every
        self._phase = ""
        self._open = False

    def update(self, event: ProgressEvent) -> None:
        if event.phase == "evaluated":
            return  # rank 0's log has it
        now = time.monotonic()
        last = event.step == event.total
        if self._terminal and event.phase == "train":
            self._out.write(f"\r{show(event)}\x1b[K")
            self._out.flush()
            self._open = True
            if last:
                self.end()
        elif now - self._last_line >= self._every or event.phase != self._phase or last:
            self.end()
            self._last_line = now
            log.info("%s", show(event))
        self._phase = event.phase

    def text(self, text: str, level: int = logging.INFO) -> None:
        self.end()
        log.log(level, "%s", text)

    def end(self) -> None:
        """Leave the bar's line."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False


class ProgressReader:
    """Reader of the driver: a thread that follows the growing file during a `with` block.

    Args:
        path: path of rank 0's file, which may not exist yet.
        on_progress: called with each event, before it is shown.
    """

    def __init__(self, path: Location, bar: ProgressBar, on_progress: OnProgress = lambda event: None) -> None:
        self._path, self._bar, self._on_progress = path, bar, on_progress
        self._offset = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> ProgressReader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._bar.end()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._read()
        self._read()

    def _read(self) -> None:
        try:
            with self._path.open() as f:
                f.seek(self._offset)
                content = f.read()
        except OSError:
            return  # the file does not exist yet, or the store is away: try again later
        complete = content.rfind(b"\n") + 1
        self._offset += complete
        for line in content[:complete].splitlines():
            message = json.loads(line)
            if "progress" in message:
                event = ProgressEvent(**message["progress"])
                self._on_progress(event)
                self._bar.update(event)
            else:
                self._bar.text(message["text"], message["level"])
