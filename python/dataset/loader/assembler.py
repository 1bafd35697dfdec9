"""Batches put together in place: each stream writes its rows where they belong; a batch is ready when all have.

So a value is written once: from its column in the file's order to its place in a batch. The matrices lie column by
column, and a stream's rows of a step are consecutive in each. Lists are put together when their batch is taken, those
of numbers padded: those that wait take the memory of their values alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from headrace.dataset.buffers import BufferPool
from headrace.dataset.loader.batch import Batch
from headrace.dataset.loader.matrices import MatrixColumns
from headrace.dataset.native import Array
from headrace.jagged import JaggedArray, concatenated
from headrace.schema import Feature

Part = TypeVar("Part")

_ALIGNMENT = 64


@dataclass
class PartialBatch:
    """A batch that is being put together; of continuous and codes the features of one value a row.

    continuous: float32 [C', B]; codes: int64 [S', B]; labels: float32 [1, B].
    """

    continuous: Array
    codes: Array
    labels: Array
    #: Rows that are not written yet.
    missing: int
    #: By carried column, then by stream: parts in order.
    carried: dict[str, dict[int, list[Array]]] = field(default_factory=dict)
    #: By list feature, then by stream: parts in order.
    jagged: dict[str, dict[int, list[JaggedArray]]] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchSlice:
    """Where some consecutive rows of a stream belong: columns `rows` of a batch's matrices."""

    step: int
    batch: PartialBatch
    rows: slice


class BatchAssembler:
    """The batches that are under way, and those that wait to be taken.

    Streams begin what is at most `ahead` steps before the step that is taken next.

    Args:
        continuous: the columns of the continuous features.
        categorical: the features of codes and raw ids.
        carried: names of the columns that are carried.
        rows_each: rows of a step that each stream has.
        totals: rows of each stream that are given in all; None: without end.
        streams: how many there are.
        first: the first step.
        ahead: see above; at least 1.
    """

    def __init__(
        self,
        continuous: MatrixColumns,
        categorical: Sequence[Feature],
        carried: Sequence[str],
        rows_each: int,
        totals: Sequence[int] | None,
        streams: int,
        first: int,
        ahead: int,
    ) -> None:
        self._continuous, self._carried = continuous, tuple(carried)
        self._codes = sum(not f.is_list for f in categorical)
        #: By feature of lists of codes or raw ids, the type of its values.
        self._lists = {f.name: np.dtype(f.dtype) for f in categorical if f.is_list}
        self.rows_each, self._totals, self._streams = rows_each, totals, streams
        self._next, self._ahead = first, ahead
        self._partial: dict[int, PartialBatch] = {}
        self._buffers = BufferPool(keep=4_096)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        #: Seconds for which the consumer waited for a batch.
        self.wait_seconds = 0.0

    def wait_for_room(self, step: int) -> bool:
        """Wait until a stream may begin to write this step; whether it still should."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step < self._next + self._ahead)
            return not self._closed

    def slices(self, stream: int, row: int, rows: int) -> list[BatchSlice]:
        """Where rows [row, row + rows) of a stream belong, in order. They are the stream's alone to write."""
        found = []
        with self._changed:
            end = row + rows
            while row < end:
                step, within = divmod(row, self.rows_each)
                n = min(end - row, self.rows_each - within)
                batch = self._partial.get(step)
                if batch is None:
                    batch = self._partial[step] = self._new_batch(step)
                at = sum(self._rows(s, step) for s in range(stream)) + within
                found.append(BatchSlice(step, batch, slice(at, at + n)))
                row += n
        return found

    def mark_written(self, slices: Sequence[BatchSlice]) -> None:
        """The rows of these slices are there."""
        with self._changed:
            for part in slices:
                part.batch.missing -= part.rows.stop - part.rows.start
            self._changed.notify_all()

    def fail(self, e: BaseException) -> None:
        """Let the consumer raise this where a batch lacks rows."""
        with self._changed:
            self._failure = self._failure or e
            self._changed.notify_all()

    def take(self) -> Batch:
        """The next batch. Where no stream has rows for it, it has none.

        Raises:
            Exception: what kept a stream from writing its rows.
        """
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready() or self._failure is not None)
            self.wait_seconds += time.perf_counter() - began
            if not self._is_ready():
                assert self._failure is not None
                raise self._failure
            batch = self._partial.pop(self._next, None) or self._new_batch(self._next)
            self._next += 1
            self._changed.notify_all()
        carried = {name: _joined(batch.carried.get(name, {})) for name in self._carried}
        jagged = {name: _in_order(parts) for name, parts in batch.jagged.items()}
        lists = {name: concatenated(jagged.get(name, []), dtype) for name, dtype in self._lists.items()}
        return Batch(self._matrix(batch.continuous, jagged).T, batch.codes.T, batch.labels[0], carried, lists)

    def close(self) -> None:
        """Let streams end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_ready(self) -> bool:
        batch = self._partial.get(self._next)
        return batch.missing == 0 if batch is not None else self._rows_of(self._next) == 0

    def _rows(self, stream: int, step: int) -> int:
        """Rows of a stream in a step."""
        if self._totals is None:
            return self.rows_each
        return min(self.rows_each, max(0, self._totals[stream] - step * self.rows_each))

    def _rows_of(self, step: int) -> int:
        return sum(self._rows(s, step) for s in range(self._streams))

    def _new_batch(self, step: int) -> PartialBatch:
        """Its three matrices are one block of memory."""
        rows = self._rows_of(step)
        continuous, codes = len(self._continuous.scalars), self._codes
        first = -(-continuous * rows * 4 // _ALIGNMENT) * _ALIGNMENT
        second = first + codes * rows * 8
        block = self._buffers.empty((second + rows * 4,), np.uint8)
        return PartialBatch(
            block[: continuous * rows * 4].view(np.float32).reshape(continuous, rows),
            block[first:second].view(np.int64).reshape(codes, rows),
            block[second:].view(np.float32).reshape(1, rows),
            missing=rows,
        )

    def _matrix(self, scalars: Array, jagged: Mapping[str, Sequence[JaggedArray]]) -> Array:
        """A batch's numbers [width, B], lists padded: `scalars` itself where no feature is a list."""
        columns = self._continuous
        if not columns.lists:
            return scalars
        out = self._buffers.empty((columns.width, scalars.shape[1]), scalars.dtype)
        columns.fill(out, scalars, jagged)
        return out


def run_streams(
    assembler: BatchAssembler,
    writers: Sequence[Iterator[int]],
    firsts: Sequence[int],
    timed: Callable[[str, Iterator[int]], Iterator[int]],
) -> list[threading.Thread]:
    """A thread for each stream: writes row group after row group, where there is room.

    Args:
        assembler: what is written to.
        writers: each writes a row group when it is asked, and gives the step that comes next.
        firsts: the step that each begins with.
        timed: is given each stream's work, to note how long it takes.
    """

    def run(writer: Iterator[int], step: int) -> None:
        try:
            work = timed("decode", writer)
            while assembler.wait_for_room(step):
                found = next(work, None)
                if found is None:
                    return
                step = found
        except BaseException as e:
            assembler.fail(e)

    threads = [
        threading.Thread(target=run, args=given, name=f"stream {i}", daemon=True)
        for i, given in enumerate(zip(writers, firsts, strict=True))
    ]
    for t in threads:
        t.start()
    return threads


def _joined(by_stream: dict[int, list[Array]]) -> Array:
    parts = _in_order(by_stream)
    return np.concatenate(parts) if parts else np.empty(0)


def _in_order(by_stream: Mapping[int, Sequence[Part]]) -> list[Part]:
    return [part for stream in sorted(by_stream) for part in by_stream[stream]]
