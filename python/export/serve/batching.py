"""Batching: requests for a model are merged into runs.

Runs that are short are computed where requests are read: handing one to a thread and back costs more than they do.
Long ones are computed by a thread, during which further requests are read and collected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from headrace.export.serve.metrics import ModelMetrics
from headrace.export.serve.model import Model
from headrace.export.serve.options import RequestError, RequestLimits
from headrace.export.serve.tensors import Array, Blocks, ShapeKey, merged

logger = logging.getLogger(__name__)

#: Expected seconds of a run up to which it is computed at once; and where there is but one core, on which a thread
#: would take turns with the loop, each of them emptying the other's caches.
_AT_ONCE, _AT_ONCE_ON_ONE_CORE = 0.002, 0.005
#: What sums of earlier runs are multiplied by at each run.
_DECAY = 0.9
#: Requests of other shapes that are looked behind for those of the first one's.
_MOST_SKIPPED = 256

Result = list[Array] | RequestError


class _Answer(asyncio.Future[list[Array]]):
    """Answer of a request; when it is cancelled, its place in the queue is empty at once.

    A client may go and come again while a long run holds the queue up: its old requests must not stay in memory, where
    they are no longer counted.
    """

    __slots__ = ("queued",)

    #: Its place in the queue; None: it has none any more.
    queued: _Waiting | None

    def cancel(self, msg: Any = None) -> bool:
        """See asyncio.Future."""
        is_new = super().cancel(msg)
        if is_new and self.queued is not None:
            self.queued.leave()
            self.queued = None
        return is_new


@dataclass(slots=True)
class _Waiting:
    batcher: Batcher
    blocks: Blocks
    rows: int
    key: ShapeKey
    until: float
    answer: _Answer

    def leave(self) -> None:
        """Wait no more."""
        self.batcher.queued_rows -= self.rows
        self.blocks, self.rows = [], 0


class Batcher:
    """The queue of one version of a model, whose rows are therefore answered by that version alone.

    Attributes:
        queued_rows: of the requests that wait.
    """

    def __init__(self, model: Model, limits: RequestLimits, executor: Executor, metrics: ModelMetrics) -> None:
        self._model, self._limits, self._executor, self._metrics = model, limits, executor, metrics
        self._queue: deque[_Waiting] = deque()
        self.queued_rows = 0
        self._seconds, self._rows = 0.0, 0.0  # of the last runs
        self._running = False
        self._scheduled: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._at_once = _AT_ONCE_ON_ONE_CORE if len(os.sched_getaffinity(0)) == 1 else _AT_ONCE

    @property
    def _seconds_per_row(self) -> float:
        return self._seconds / self._rows if self._rows else 0.0

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing runs."""
        return not self._queue and not self._running

    def submit(self, blocks: Blocks, rows: int, key: ShapeKey, timeout: float) -> asyncio.Future[list[Array]]:
        """Have the model run.

        Args:
            blocks: its inputs, in order.
            rows: of each of them.
            key: see `blocks.key_of`.
            timeout: seconds within which the run must begin.

        Raises:
            RequestError: so much waits already that it would not begin in time (503).
        """
        wait = self.queued_rows * self._seconds_per_row
        if wait > timeout or self.queued_rows >= self._limits.rows * 4:
            self._metrics.refused.inc()
            message = f"model '{self._model.name}' has {self.queued_rows:,} rows waiting"
            raise RequestError(503, message, retry_after=max(1, round(wait)))
        now = time.monotonic()
        answer = _Answer(loop=self._loop)
        answer.queued = _Waiting(self, blocks, rows, key, now + timeout, answer)
        self._queue.append(answer.queued)
        self.queued_rows += rows
        if self._scheduled is None and not self._running:
            delay = self._limits.batch_delay
            self._scheduled = self._loop.call_later(delay, self._next) if delay else self._loop.call_soon(self._soon)
        elif self._limits.batch_delay and not self._running and self.queued_rows >= self._limits.batch_rows:
            assert self._scheduled is not None
            self._scheduled.cancel()
            self._scheduled = self._loop.call_soon(self._next)
        return answer

    def _soon(self) -> None:
        """Begin a run in the next turn of the loop.

        At the end of this one, answers of the run before are written, which a run computed now would hold up, and
        further requests are read.
        """
        self._scheduled = self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin a run with what waits."""
        self._scheduled = None
        batch = self._take()
        if not batch:
            return
        rows = sum(w.rows for w in batch)
        # Before the first run, and of tensors without rows, nobody knows how long it takes.
        if self._model.by_row and self._rows and rows * self._seconds_per_row <= self._at_once:
            self._answer(batch, *self._run(batch))
        else:
            self._running = True
            run: Future[tuple[list[Result], float]] = self._executor.submit(self._run, batch)
            run.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._on_run_done, batch, done))

    def _on_run_done(self, batch: list[_Waiting], run: Future[tuple[list[Result], float]]) -> None:
        self._running = False
        self._answer(batch, *run.result())

    def _take(self) -> list[_Waiting]:
        """Return the oldest request, and those behind it of the same shapes."""
        now, rows = time.monotonic(), 0
        batch: list[_Waiting] = []
        skipped: list[_Waiting] = []
        while self._queue:
            waiting = self._queue[0]
            if waiting.answer.done():  # who asked has gone
                self.queued_rows -= waiting.rows
            elif waiting.until < now:
                self.queued_rows -= waiting.rows
                self._metrics.late.inc()
                waiting.answer.set_exception(RequestError(503, "the request has waited too long", retry_after=1))
            elif not batch or (waiting.key == batch[0].key and self._model.by_row):
                if batch and rows + waiting.rows > self._limits.batch_rows:
                    break
                self.queued_rows -= waiting.rows
                rows += waiting.rows
                batch.append(waiting)
            elif not self._model.by_row or len(skipped) == _MOST_SKIPPED:
                break
            else:
                skipped.append(self._queue.popleft())
                continue
            waiting.answer.queued = None
            self._queue.popleft()
        self._queue.extendleft(reversed(skipped))
        return batch

    def _run(self, batch: list[_Waiting]) -> tuple[list[Result], float]:
        """Return the answers, and the seconds a row that they took."""
        started = time.perf_counter()
        results: list[Result]
        try:
            results = self._run_merged(batch)
        except Exception as e:
            # One of them is to blame: the others are answered.
            results = [self._refusal(e)] if len(batch) == 1 else [self._run_alone(w) for w in batch]
        seconds = time.perf_counter() - started
        return results, seconds

    def _run_merged(self, batch: list[_Waiting]) -> list[Result]:
        if len(batch) == 1:
            return [self._model.run_blocks(batch[0].blocks)]
        outputs = self._model.run_blocks(merged([w.blocks for w in batch]))
        results: list[Result] = []
        start = 0
        for w in batch:
            results.append([x[start : start + w.rows] for x in outputs])
            start += w.rows
        return results

    def _run_alone(self, waiting: _Waiting) -> Result:
        try:
            return self._model.run_blocks(waiting.blocks)
        except Exception as e:
            return self._refusal(e)

    def _refusal(self, e: Exception) -> RequestError:
        if isinstance(e, RequestError):
            return e
        logger.error("a run of version %s of model '%s' failed", self._model.version, self._model.name, exc_info=e)
        return RequestError(500, f"an error of the server in model '{self._model.name}': see its log")

    def _answer(self, batch: list[_Waiting], results: list[Result], seconds: float) -> None:
        rows = sum(w.rows for w in batch)
        self._seconds = _DECAY * self._seconds + seconds
        self._rows = _DECAY * self._rows + max(1, rows)
        self._metrics.batch(rows, len(batch), seconds)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(result, RequestError):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(result)
        if self._queue and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._soon)
