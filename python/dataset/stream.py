"""One stream of a split: row groups in turn, rows given out in portions of any size."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.dataset.batch import Batch
from headrace.dataset.buffers import Buffers
from headrace.dataset.layout import RowGroup, SplitLayout, columns_of, stored_columns
from headrace.dataset.matrices import Order, to_batch
from headrace.dataset.negatives import NegativePlan, expanded_sizes
from headrace.dataset.order import Visit, negatives_generator, row_order, visits
from headrace.dataset.prefetch import Prefetch
from headrace.dataset.reader import RowGroupReader
from headrace.dataset.row_group import StoredRowGroup
from headrace.schema import DatasetSchema, Kind


class Stream:
    """The rows of every `streams`-th row group, from row `start` of the endless stream on.

    A thread reads row groups and puts their rows in order; at most three are in memory: the one that is given out, the
    next, and the one after that, which is being made.

    Args:
        layout: the split.
        seed: of the order.
        stream: which of `streams` it is.
        plan: negatives to add.
        carried: carried columns to read along.
        start: rows already given, over all epochs.
        shuffle: an order of each epoch's own, without end; else one pass in stored order.
    """

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        seed: int,
        stream: int,
        streams: int,
        plan: NegativePlan | None,
        carried: Sequence[str],
        start: int,
        *,
        shuffle: bool,
    ) -> None:
        self._groups = layout.stream(stream, streams)
        self._schema, self._carried = schema, tuple(carried)
        self._seed, self._stream, self._plan, self._shuffle = seed, stream, plan, shuffle
        self._visits: deque[Visit] = deque()
        self._buffers = Buffers()
        self._portion: _Portion | None = None
        self._reader: RowGroupReader | None = None
        self._portions: Prefetch[_Portion] | None = None
        if self._groups:
            sizes = expanded_sizes(self._groups, schema, plan)
            order = visits(seed, stream, sizes, start, shuffle)
            if not shuffle:
                order = itertools.islice(order, len(sizes))
            mine, pieces = layout.alone(self._groups)
            self._reader = RowGroupReader(mine, stored_columns(schema, carried), self._pieces(order, pieces))
            self._portions = Prefetch(map(self._portion_of, self._reader), depth=1)

    def _pieces(self, order: Iterator[Visit], pieces: Sequence[int]) -> Iterator[int]:
        for visit in order:
            self._visits.append(visit)
            yield pieces[visit.group]

    def take(self, rows: int) -> list[Batch]:
        """The next `rows` rows, in parts that are views; fewer, down to 0, at the end of a finite stream."""
        parts: list[Batch] = []
        while rows:
            if self._portion is None or self._portion.left == 0:
                self._portion = None if self._portions is None else next(self._portions, None)
                if self._portion is None:
                    break
            part = self._portion.take(rows)
            rows -= part.rows
            parts.append(part)
        return parts or [_empty(self._schema, self._carried)]

    def _portion_of(self, stored: StoredRowGroup) -> _Portion:
        with stored:
            visit = self._visits.popleft()
            group, order = self._groups[visit.group], None
            if self._shuffle:
                order = row_order(self._seed, visit.epoch, self._stream, visit.group, stored.num_rows)
            if self._plan is None:
                return _Portion(self._batch(stored, group, order), visit.skip)
            assert order is not None
            generator = negatives_generator(self._seed, visit.epoch, self._stream, visit.group)
            return _Portion(self._with_negatives(stored, group, order, self._plan, generator), visit.skip)

    def _batch(self, stored: StoredRowGroup, group: RowGroup, order: Order | None) -> Batch:
        return to_batch(stored, self._schema, self._carried, group, order, self._buffers)

    def _with_negatives(
        self, stored: StoredRowGroup, group: RowGroup, order: Order, plan: NegativePlan, generator: np.random.Generator
    ) -> Batch:
        """The rows in the given order, each positive followed by its negatives."""
        labels = stored.column(self._schema.label.name).to_numpy()[order]
        copies = plan.copies(labels)
        first = np.cumsum(copies) - copies
        is_copy = np.ones(int(copies.sum()), bool)
        is_copy[first] = False
        found = self._batch(stored, group, np.repeat(order, copies))
        own = found.codes[first[labels > 0], plan.column].astype(np.int64)
        found.codes[is_copy, plan.column] = plan.draw(own, generator).reshape(-1)
        found.labels[is_copy] = 0.0
        return found

    def close(self) -> None:
        if self._portions is not None and self._reader is not None:
            self._portions.close()
            self._reader.close()


class _Portion:
    """The rows of one row group in their order, with their negatives right after each positive."""

    def __init__(self, rows: Batch, skip: int) -> None:
        self._rows, self._at = rows, skip

    @property
    def left(self) -> int:
        return self._rows.rows - self._at

    def take(self, rows: int) -> Batch:
        """At most `rows` rows: views."""
        chosen = slice(self._at, min(self._at + rows, self._rows.rows))
        self._at = chosen.stop
        return self._rows.part(chosen)


def _empty(schema: DatasetSchema, carried: Sequence[str]) -> Batch:
    c, s = (len(columns_of(schema.of(k))) for k in (Kind.CONTINUOUS, Kind.CATEGORICAL))
    return Batch(
        np.empty((0, c), np.float32), np.empty((0, s), np.int64), np.empty(0, np.float32),
        {name: np.empty(0) for name in carried},
    )  # fmt: skip
