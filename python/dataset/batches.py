"""Batches, put together in place: each stream writes its rows where they belong; a batch is ready when all have.

So a value is written once: from its column in the file's order to its place in a batch. A column of a row group fits a
core's second-level cache, into which it was just read. There its values are checked, picked in the order of the batch,
and written side by side. The matrices lie column by column, and a stream's rows of a step are consecutive in each.

Lists stay offsets and values, and are put together when their batch is taken, those of numbers padded. So lists that
wait take the memory of their values alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headrace.compute.jagged import JaggedArray, concatenated
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.dataset import lists, native
from headrace.dataset.native import Array, Order, OutputColumns
from headrace.dataset.row_groups import BufferPool, StoredRowGroup
from headrace.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a step. The columns of `continuous` and `codes` are the schema's features, in its order.

    continuous: float32 [B, C], a list has `length` columns, 0 behind its end; codes: int64 [B, S], of the S categorical
    features of one value a row; labels: float32 [B]; carried: requested carried columns, each [B]; lists: of the
    categorical features of lists, by name, in the schema's order: codes int32 or raw ids int64, without padding, with
    int64 offsets from 0. B may be 0 in an evaluation pass. negatives: ids that are drawn for each row, int64 [B, n], or
    for all of the step's rows, [n] (headrace.dataset.candidates).

    The matrices lie column by column in memory, as the file does. Memory is used again when nothing refers to it.
    """

    continuous: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    carried: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    lists: Mapping[str, JaggedArray] = field(default_factory=dict)
    negatives: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        return int(self.labels.shape[0])


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
    """Places of consecutive rows of a stream: columns `rows` of a batch's matrices."""

    step: int
    batch: PartialBatch
    rows: slice


class BatchAssembler:
    """Batches that streams are writing, and complete ones that wait for the consumer.

    Streams begin what is at most `ahead` steps before the step that is taken next.

    Args:
        continuous: the columns of the continuous features.
        categorical: the features of codes and raw ids.
        carried: names of the columns that are carried.
        rows_each: rows of a step that each stream has.
        totals: rows of each stream over all steps; None: endless.
        streams: number of streams.
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
        """Wait until a stream may begin to write this step; return False where the loader was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step < self._next + self._ahead)
            return not self._closed

    def slices(self, stream: int, row: int, rows: int) -> list[BatchSlice]:
        """Return the places of rows [row, row + rows) of a stream, in order. They are the stream's alone to write."""
        parts = []
        with self._changed:
            end = row + rows
            while row < end:
                step, offset = divmod(row, self.rows_each)
                n = min(end - row, self.rows_each - offset)
                batch = self._partial.get(step)
                if batch is None:
                    batch = self._partial[step] = self._new_batch(step)
                column = sum(self._rows(s, step) for s in range(stream)) + offset
                parts.append(BatchSlice(step, batch, slice(column, column + n)))
                row += n
        return parts

    def mark_written(self, slices: Sequence[BatchSlice]) -> None:
        """Mark the rows of these slices as written."""
        with self._changed:
            for part in slices:
                part.batch.missing -= part.rows.stop - part.rows.start
            self._changed.notify_all()

    def fail(self, e: BaseException) -> None:
        """Record a stream's error, which `take` raises where a batch lacks rows."""
        with self._changed:
            self._failure = self._failure or e
            self._changed.notify_all()

    def take(self) -> Batch:
        """Return the next batch; it is empty where no stream has rows for it.

        Raises:
            Exception: the error of a stream that could not write its rows.
        """
        start_time = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready() or self._failure is not None)
            self.wait_seconds += time.perf_counter() - start_time
            if not self._is_ready():
                assert self._failure is not None
                raise self._failure
            batch = self._partial.pop(self._next, None) or self._new_batch(self._next)
            self._next += 1
            self._changed.notify_all()
        carried = {name: _joined_parts(batch.carried.get(name, {})) for name in self._carried}
        jagged = {name: _in_order(parts) for name, parts in batch.jagged.items()}
        lists = {name: concatenated(jagged.get(name, []), dtype) for name, dtype in self._lists.items()}
        return Batch(self._matrix(batch.continuous, jagged).T, batch.codes.T, batch.labels[0], carried, lists)

    def close(self) -> None:
        """Close: streams end when they next wait for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_ready(self) -> bool:
        batch = self._partial.get(self._next)
        return batch.missing == 0 if batch is not None else self._rows_of(self._next) == 0

    def _rows(self, stream: int, step: int) -> int:
        """Return rows of a stream in a step."""
        if self._totals is None:
            return self.rows_each
        return min(self.rows_each, max(0, self._totals[stream] - step * self.rows_each))

    def _rows_of(self, step: int) -> int:
        return sum(self._rows(s, step) for s in range(self._streams))

    def _new_batch(self, step: int) -> PartialBatch:
        """Return an empty batch, whose three matrices are one block of memory."""
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
        """Return a batch's numbers [width, B], lists padded: `scalars` itself where no feature is a list."""
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
    """Start a thread for each stream, which writes row group after row group, where there is room.

    Args:
        assembler: of the batches that the streams write.
        writers: each `next` of a writer writes a row group and returns the step that follows.
        firsts: first step of each writer.
        timed: wraps the iterator of each stream, to measure its time.
    """

    def run(writer: Iterator[int], step: int) -> None:
        try:
            work = timed("decode", writer)
            while assembler.wait_for_room(step):
                next_step = next(work, None)
                if next_step is None:
                    return
                step = next_step
        except BaseException as e:
            assembler.fail(e)

    threads = [
        threading.Thread(target=run, args=arguments, name=f"stream {i}", daemon=True)
        for i, arguments in enumerate(zip(writers, firsts, strict=True))
    ]
    for t in threads:
        t.start()
    return threads


def _joined_parts(by_stream: dict[int, list[Array]]) -> Array:
    parts = _in_order(by_stream)
    return np.concatenate(parts) if parts else np.empty(0)


def _in_order(by_stream: Mapping[int, Sequence[Part]]) -> list[Part]:
    return [part for stream in sorted(by_stream) for part in by_stream[stream]]


class MatrixColumns:
    """Columns of numbers in a batch's matrix: a list has `length` columns of it.

    Args:
        features: those of the matrix, in its order.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        firsts = np.cumsum([0, *(len(f.physical) for f in features)]).tolist()
        #: Columns of the matrix.
        self.width: int = firsts[-1]
        #: Features of one value a row, and the column of each.
        self.scalars = tuple(f for f in features if not f.is_list)
        self.scalar_columns = tuple(c for f, c in zip(features, firsts, strict=False) if not f.is_list)
        #: List features, and the first column of each.
        self.lists = tuple((f, c) for f, c in zip(features, firsts, strict=False) if f.is_list)

    def fill(self, out: Array, scalars: Array, jagged: Mapping[str, Sequence[JaggedArray]]) -> None:
        """Fill a batch's matrix.

        Args:
            out: [width, rows].
            scalars: [scalars, rows].
            jagged: by list feature: all rows' lists, in parts of consecutive rows.
        """
        out[list(self.scalar_columns)] = scalars
        for feature, first in self.lists:
            padded = out[first : first + feature.length].T
            row = 0
            for part in jagged.get(feature.name, ()):
                lists.fill(padded[row : row + len(part)], part)
                row += len(part)


def write_features(
    stored: StoredRowGroup,
    schema: DatasetSchema,
    order: Order,
    continuous: OutputColumns,
    codes: OutputColumns,
    labels: OutputColumns,
    *,
    place: str,
) -> dict[str, JaggedArray]:
    """Write what a model reads of features with one value a row.

    Args:
        stored: the row group's columns.
        order: which rows, in which order; a row may come more than once.
        continuous: float32 [C', parts of `order`], C' features of one value a row.
        codes: int64 [S', the same].
        labels: float32 [1, the same].
        place: for messages.

    Returns:
        By list feature: the lists of the rows in `order`.

    Raises:
        UserError: a null in a feature, a list above its length, or a code outside [0, cardinality). Raw ids may be any.
    """
    jagged: dict[str, JaggedArray] = {}
    for features, out in (
        (schema.of(Kind.CONTINUOUS), continuous),
        (schema.of(Kind.CATEGORICAL), codes),
        ((schema.label,), labels),
    ):
        scalar = 0
        for feature in features:
            column_place = f"{place}: column '{feature.name}'"
            if feature.is_list:
                values = jagged[feature.name] = _lists(stored, feature, order, column_place)
                _check(_largest(values.values), values.values, feature, column_place)
                continue
            column = stored.column(feature.name)
            if column.null_count:
                raise UserError(
                    f"{column_place} has {column.null_count} nulls, which a model cannot "
                    f"read; add fill_missing to its operators in features.workflow"
                )
            array = column.to_numpy()
            _check(native.gather(array, order, out, scalar), array, feature, column_place)
            scalar += 1
    return jagged


def _lists(stored: StoredRowGroup, feature: Feature, order: Order, column_place: str) -> JaggedArray:
    column = stored.column(feature.name)
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    for chunk in chunks:
        lists.check(chunk, feature.length, column_place)
    offsets, values = lists.to_numpy(column.combine_chunks() if len(chunks) != 1 else chunks[0])
    return JaggedArray(*lists.take(offsets, values, order))


def _largest(values: Array) -> int:
    """Return the largest number, as unsigned (see `native.gather`); 0 of what are no integers."""
    return int(values.view(f"u{values.itemsize}").max()) if values.dtype.kind == "i" and len(values) else 0


def _check(largest: int, values: Array, feature: Feature, column_place: str) -> None:
    if feature.kind is not Kind.CATEGORICAL or feature.dynamic:
        return
    # As an unsigned number, what is below 0 is far above.
    if len(values) and largest >= (feature.cardinality or 0):
        raise UserError(
            f"{column_place} has codes {values.min()}..{values.max()}, outside its "
            f"vocabulary [0, {feature.cardinality or 0}). Delete the dataset's folder and run the features stage again"
        )
