"""Models of a version: graphs in onnxruntime, chains of them, and the merging of requests into runs.

A folder without export.json is the model MODEL. An export has these models, with their names in a Triton repository
(`headrace export --format triton`):

- MODEL.model: from rows of codes and numbers to predictions
- MODEL.features: from raw columns to such rows, if the export has that graph
- MODEL: MODEL.features, then MODEL.model; without MODEL.features the same as MODEL.model
- MODEL.query, MODEL.item: for a model in retrieval form, vectors of a row's query and of its item
- MODEL.index: from a vector to the codes of the items nearest to it, by all dot products
- MODEL.retrieve: MODEL.features, MODEL.query, MODEL.index

Short runs are computed by the thread that reads requests, since handing them to another thread costs more than they do.
Long runs are computed by another thread, while further requests are read and collected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from headrace.export.serve.options import ModelMetrics, RequestError, RequestLimits
from headrace.export.serve.repository import VersionFolder
from headrace.export.serve.tensors import (
    DATATYPES,
    ONNX_TYPES,
    Array,
    Blocks,
    ShapeKey,
    TensorSpec,
    blocks_of,
    has_nan,
    inputs_of,
    merged,
    nan_error,
)

#: Rows of the runs that check a version before it serves: it runs, and its outputs have a row for each input row.
_WARM_UP_ROWS = (1, 3)
#: Suffix of the models that compute features from raw columns, in which NaN is a missing value.
FEATURES = ".features"

#: Number of items that MODEL.index returns, best first.
INDEX_ITEMS = 100
#: Suffix of the outputs of MODEL.features, since inputs and outputs of a graph cannot share a name.
_SUFFIX = ".feature"
#: Most scores in memory at once.
_SCORES = 1 << 22


class LoadFailure(Exception):
    """Error of a graph that cannot be served."""


class Model:
    """Model that answers under a name.

    Attributes:
        name: name of the model.
        version: version of the model.
        inputs: inputs in order.
        outputs: outputs in order.
        by_row: whether the first dimension of every tensor is rows, so that requests can be merged.
    """

    def __init__(
        self, name: str, version: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], by_row: bool
    ) -> None:
        self.name, self.version = name, version
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.input_index = {x.name: i for i, x in enumerate(self.inputs)}
        self.output_index = {x.name: i for i, x in enumerate(self.outputs)}
        self.by_row = by_row

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        """Compute the outputs, in order, from inputs in order. Raises RequestError if the model refuses the inputs."""
        raise NotImplementedError

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        """Compute outputs from blocks, as `run` does from inputs."""
        return self.run(inputs_of(blocks))

    def warm_up(self) -> None:
        """Run the model, and check that outputs have a row for each row. Raises LoadFailure if it does not run."""
        for rows in _WARM_UP_ROWS if self.by_row else (1,):
            try:
                outputs = self.run([_zeros(x, rows) for x in self.inputs])
            except RequestError as e:
                raise LoadFailure(f"a first run fails: {e.message}") from None
            self.by_row = self.by_row and all(x.shape[0] == rows for x in outputs)


class OnnxGraph(Model):
    """One ONNX graph."""

    def __init__(self, name: str, version: int, graph: Path, threads: int, allow_nan: bool = False) -> None:
        """Load a graph; `allow_nan`: whether NaN is a valid input."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Waiting threads must not spin, since other threads read requests.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as e:  # onnxruntime raises many types without a common base
            raise LoadFailure(f"onnxruntime {onnxruntime.__version__}: {_one_line(e)}") from None
        inputs = [_spec(x) for x in self._session.get_inputs()]
        outputs = [_spec(x) for x in self._session.get_outputs()]
        by_row = all(x.shape and x.shape[0] == -1 for x in (*inputs, *outputs))
        super().__init__(name, version, inputs, outputs, by_row)
        self._names = [x.name for x in inputs]
        self._output_names = [x.name for x in outputs]
        self._allow_nan = allow_nan or name.endswith(FEATURES)
        self.warm_up()

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        return self.run_blocks(blocks_of(feeds))

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        # Raw tensors begin anywhere in a request's memory, and kernels of onnxruntime may need aligned addresses.
        blocks = [x if x.flags.aligned else x.copy() for x in blocks]
        feeds = dict(zip(self._names, inputs_of(blocks), strict=True))
        if not self._allow_nan and any(x.dtype.kind == "f" and has_nan(x) for x in blocks):
            raise next(nan_error(n, x) for n, x in feeds.items() if x.dtype.kind == "f" and has_nan(x))
        try:
            outputs: list[Array] = self._session.run(self._output_names, feeds)
        except Exception as e:
            raise RequestError(400, f"model '{self.name}' cannot compute these rows: {_one_line(e)}") from None
        return outputs


def _spec(x: Any) -> TensorSpec:
    datatype = ONNX_TYPES.get(x.type)
    if datatype is None:
        raise LoadFailure(f"'{x.name}' is a {x.type}, which the protocol has no type for")
    return TensorSpec(x.name, datatype, tuple(n if isinstance(n, int) and n >= 0 else -1 for n in x.shape))


def _zeros(spec: TensorSpec, rows: int) -> Array:
    shape = tuple((rows if i == 0 else 1) if n == -1 else n for i, n in enumerate(spec.shape))
    if spec.datatype == "BYTES":
        return np.full(shape, "", object)
    return np.zeros(shape, DATATYPES[spec.datatype])


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())[:500]


def models_of(folder: VersionFolder, threads: int, allow_nan: bool) -> dict[str, Model]:
    """Load a version's models, by their names in requests. Raises LoadFailure or ValueError if it is damaged."""
    parts, name, version = folder.parts(), folder.model, folder.version
    if not parts.graphs:
        return {name: OnnxGraph(name, version, parts.graph, threads, allow_nan)}
    models: dict[str, Model] = {
        f"{name}.{key}": OnnxGraph(f"{name}.{key}", version, file, threads, allow_nan)
        for key, file in parts.graphs.items()
    }
    features = [models[f"{name}.features"]] if "features" in parts.graphs else []
    if "model" in parts.graphs:
        models[name] = ModelChain(name, version, [*features, models[f"{name}.model"]])
    if parts.items is not None and "query" in parts.graphs:
        models[f"{name}.index"] = index = ItemIndex(f"{name}.index", version, *parts.items)
        models[f"{name}.retrieve"] = ModelChain(
            f"{name}.retrieve", version, [*features, models[f"{name}.query"], index]
        )
    return models


class ModelChain(Model):
    """A chain of models: the outputs of each are inputs of the next, by name."""

    def __init__(self, name: str, version: int, models: Sequence[Model]) -> None:
        first, last = models[0], models[-1]
        super().__init__(name, version, first.inputs, last.outputs, all(m.by_row for m in models))
        self._first = first
        self._then: list[tuple[Model, list[int]]] = []
        for previous, model in pairwise(models):
            outputs_of = {x.name.removesuffix(_SUFFIX): i for i, x in enumerate(previous.outputs)}
            if missing := [x.name for x in model.inputs if x.name not in outputs_of]:
                raise LoadFailure(
                    f"'{model.name}' asks for {', '.join(missing)}, which '{previous.name}' does not give"
                )
            self._then.append((model, [outputs_of[x.name] for x in model.inputs]))
        self.warm_up()

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        return self.run_blocks(blocks_of(feeds))

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        tensors = self._first.run_blocks(blocks)
        for model, columns in self._then:
            tensors = model.run([tensors[i] for i in columns])
        return tensors


class ItemIndex(Model):
    """Search of the items with the greatest dot products: codes, best first, then -1 with minus infinity."""

    def __init__(self, name: str, version: int, file: Path, first_code: int) -> None:
        try:
            self._vectors = np.load(file, mmap_mode="r")[first_code:]
        except (OSError, ValueError) as e:
            raise LoadFailure(f"{file}: {e}") from None
        if self._vectors.ndim != 2 or self._vectors.dtype != np.float32:
            raise LoadFailure(f"{file} must be float32 [items, columns]")
        self._first_code = first_code
        inputs = [TensorSpec("query_vector", "FP32", (-1, self._vectors.shape[1]))]
        outputs = [
            TensorSpec("item_row", "INT64", (-1, INDEX_ITEMS)),
            TensorSpec("item_score", "FP32", (-1, INDEX_ITEMS)),
        ]
        super().__init__(name, version, inputs, outputs, True)

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        (queries,) = feeds
        codes = np.full((len(queries), INDEX_ITEMS), -1, np.int64)
        scores = np.full(codes.shape, -np.inf, np.float32)
        k = min(INDEX_ITEMS, len(self._vectors))
        step = max(1, _SCORES // max(1, len(self._vectors)))
        for start in range(0, len(queries) if k else 0, step):
            products = queries[start : start + step] @ self._vectors.T
            # Of equal scores the lower code comes first, also at the k-th place.
            order = np.argsort(-products, axis=1, kind="stable")[:, :k]
            codes[start : start + step, :k] = order + self._first_code
            scores[start : start + step, :k] = np.take_along_axis(products, order, 1)
        return [codes, scores]


logger = logging.getLogger(__name__)

#: Largest expected seconds of a run that the event loop computes itself; more on a single core, where a thread and the
#: loop would evict each other's caches.
_AT_ONCE, _AT_ONCE_ON_ONE_CORE = 0.002, 0.005
#: Factor by which each run decays the sums of earlier runs.
_DECAY = 0.9
#: Most requests of other shapes that are skipped to find requests of the first one's shapes.
_MOST_SKIPPED = 256

Result = list[Array] | RequestError


class _Answer(asyncio.Future[list[Array]]):
    """Answer of a request; cancelling it empties its place in the queue at once.

    A client may reconnect during a long run. Its old requests must not stay in memory, where they are no longer
    counted.
    """

    __slots__ = ("queued",)

    #: Place of the request in the queue; None once it has left.
    queued: _Waiting | None

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the answer, and leave the queue."""
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
        """Leave the queue."""
        self.batcher.queued_rows -= self.rows
        self.blocks, self.rows = [], 0


class Batcher:
    """Queue of one version of a model, which answers all of its requests.

    Attributes:
        queued_rows: rows of the waiting requests.
    """

    def __init__(self, model: Model, limits: RequestLimits, executor: Executor, metrics: ModelMetrics) -> None:
        self._model, self._limits, self._executor, self._metrics = model, limits, executor, metrics
        self._queue: deque[_Waiting] = deque()
        self.queued_rows = 0
        self._seconds, self._rows = 0.0, 0.0  # decayed sums of the last runs
        self._running = False
        self._scheduled: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._at_once = _AT_ONCE_ON_ONE_CORE if len(os.sched_getaffinity(0)) == 1 else _AT_ONCE

    @property
    def _seconds_per_row(self) -> float:
        return self._seconds / self._rows if self._rows else 0.0

    @property
    def idle(self) -> bool:
        """Return whether no request waits or runs."""
        return not self._queue and not self._running

    def submit(self, blocks: Blocks, rows: int, key: ShapeKey, timeout: float) -> asyncio.Future[list[Array]]:
        """Queue a request.

        Args:
            blocks: inputs in order.
            rows: number of rows of each input.
            key: see `tensors.key_of`.
            timeout: seconds within which the run must begin.

        Raises:
            RequestError: too many rows wait for the run to begin in time (503).
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
        """Begin a run in the next iteration of the event loop.

        Before that, this iteration writes the answers of the previous run and reads further requests.
        """
        self._scheduled = self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin a run with waiting requests."""
        self._scheduled = None
        batch = self._take()
        if not batch:
            return
        rows = sum(w.rows for w in batch)
        # The time is unknown before the first run, and for tensors without rows.
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
        """Take the oldest request from the queue, and later ones of the same shapes."""
        now, rows = time.monotonic(), 0
        batch: list[_Waiting] = []
        skipped: list[_Waiting] = []
        while self._queue:
            waiting = self._queue[0]
            if waiting.answer.done():  # the client has gone
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
        """Run a batch; return its answers and the seconds that it took."""
        started = time.perf_counter()
        results: list[Result]
        try:
            results = self._run_merged(batch)
        except Exception as e:
            # One request may be at fault: run each alone, so that the others are answered.
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
