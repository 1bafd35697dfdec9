"""The learning curve, and metrics.jsonl: measurements of the loop, one JSON object a line, for users' own tools.

    {"kind": "train", "step": 20, "epoch": 1, "loss": 0.51, "samples_per_s": 20110.5, "dense_rate": 0.001, ...}
    {"kind": "eval", "step": 400, "epoch": 1, "auc": 0.74, "log_loss": 0.44, ...}

Each launch writes a file of its own, line by line. The launch that completes the run renames its file to that of the
run. A launch that resumes from a checkpoint begins its file with the lines up to that checkpoint, so the file is like
that of a run without interruption.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.storage import Location
from headrace.train.callbacks.base import Callback, StepEnd
from headrace.train.callbacks.progress import LoopProgress

#: Number of points of the learning curve.
_CURVE_POINTS = 100


Line = dict[str, Any]


class MetricsFile:
    """Rank 0's file of a launch.

    Args:
        path: path of the file; None: this rank writes none.
        lines: first lines.
    """

    def __init__(self, path: Location | None, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._path = path
        if path is not None:
            path.put_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(self, kind: str, values: Mapping[str, float | int | None]) -> None:
        """Add a line."""
        if self._path is not None:
            self._path.append((json.dumps({"kind": kind, **values}) + "\n").encode())


def read_metrics(path: Location) -> list[Line]:
    """Return the complete lines of a metrics.jsonl."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def lines_before(progress: LoopProgress, files: Iterable[Location]) -> list[Line]:
    """Return the lines of the steps up to a checkpoint, in order.

    Launches that were overtaken may have measured steps that were repeated later. So a line counts only if it agrees
    with the checkpoint's own record of its step. A step that no file has gets a line from that record.

    Args:
        progress: progress in the checkpoint.
        files: files of earlier launches.
    """
    if not progress.step:
        return []
    written: dict[tuple[str, float], list[Line]] = {}
    for line in (line for file in files for line in read_metrics(file)):
        written.setdefault((line["kind"], line["step"]), []).append(line)
    lines: list[Line] = []
    history: Mapping[str, Sequence[Mapping[str, float | None]]] = {"train": progress.curve, "eval": progress.evals}
    for kind, points in history.items():
        for point in points:
            bare: Line = {"kind": kind, **point, "step": int(point["step"] or 0), "epoch": int(point["epoch"] or 0)}
            same = (line for line in written.get((kind, bare["step"]), []) if bare.items() <= line.items())
            lines.append(next(same, bare))
    return sorted(lines, key=lambda line: (line["step"], line["kind"] == "eval"))


class MetricsLog(Callback):
    """Log of mean loss and speed between points of the curve, without the time of evaluations and checkpoints.

    The sums are in `progress`, so that a checkpoint between two points loses nothing.

    Args:
        path: path of metrics.jsonl; None: this rank writes none.
        progress: progress of the loop, to whose curve points are added.
        total_steps: steps of the run; the last one closes a point.
        batch_size: rows of a step over all ranks.
        earlier: files of earlier launches.
    """

    def __init__(
        self,
        path: Location | None,
        progress: LoopProgress,
        total_steps: int,
        batch_size: int,
        earlier: Sequence[Location] = (),
    ) -> None:
        self._file = MetricsFile(path, lines_before(progress, earlier))
        self._progress, self._total_steps, self._batch_size = progress, total_steps, batch_size
        self._every = max(1, total_steps // _CURVE_POINTS)
        self._since = time.perf_counter()

    def on_step_end(self, step: StepEnd) -> None:
        now = time.perf_counter()
        self._progress.open_seconds += now - self._since
        self._progress.open_loss += step.loss
        self._progress.open_steps += 1
        self._since = now
        if step.step % self._every == 0 or step.step == self._total_steps:
            self._file.write("train", self._close_point(step.epoch) | dict(step.learning_rates))

    def on_phase_end(self, phase: str) -> None:
        if phase in ("evaluate", "checkpoint"):
            self._since = time.perf_counter()

    def on_evaluation_end(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        self._file.write("eval", {"step": step, "epoch": epoch, **metrics})
        self._since = time.perf_counter()

    def _close_point(self, epoch: int) -> dict[str, float]:
        """Add a point to the curve, and return it."""
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
