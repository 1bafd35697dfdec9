"""One stream of a split: row groups in turn, each written to the batches that its rows belong to.

The order of its rows is a pure function of (seed, epoch, stream), the same on any machine. A stream is endless: epoch
after epoch over its row groups, each epoch in an order of its own, both of row groups and of rows inside them. So any
position can be found without reading what comes before it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.compute.jagged import JaggedArray
from headrace.config.schema import DatasetSchema, Kind
from headrace.dataset import native
from headrace.dataset.batches import BatchAssembler, BatchSlice, write_features
from headrace.dataset.layout import RowGroup, SplitLayout, stored_columns
from headrace.dataset.native import Array, Order, OutputColumns
from headrace.dataset.negatives import NegativeSampler, UnknownIds, expanded_sizes
from headrace.dataset.petastorm_reader import RowGroupReader
from headrace.dataset.row_groups import ArrivingRowGroup, ReadAhead, StoredRowGroup, StoredRowGroups


class Stream:
    """The rows of every `streams`-th row group, from row `start` of the endless stream on.

        for step in stream: ...     # a row group was written; the next one begins with this step

    Args:
        layout: the split.
        seed: of the order.
        stream: its index among `streams`.
        plan: negatives to add.
        carried: carried columns to read along.
        start: rows already delivered, over all epochs.
        shuffle: endless, each epoch in an order of its own; else one pass in stored order.
        assembler: of the batches that rows are written to.
        place: the stream's index among the assembler's.
        ahead: fetches the files.
        taken: by piece, rows of each row group in an epoch, drawn anew in each. None: all rows. With it row groups may
            be of several datasets.
        unknown: ids to train as out of vocabulary, negatives' included.
    """

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        seed: int,
        stream: int,
        streams: int,
        plan: NegativeSampler | None,
        carried: Sequence[str],
        start: int,
        *,
        shuffle: bool,
        assembler: BatchAssembler,
        place: int,
        ahead: ReadAhead,
        taken: Sequence[int] | None = None,
        unknown: Sequence[UnknownIds] = (),
    ) -> None:
        self._groups = layout.stream(stream, streams)
        self._schema, self._carried = schema, tuple(carried)
        self._seed, self._stream, self._plan, self._shuffle = seed, stream, plan, shuffle
        self._assembler, self._place, self._unknown = assembler, place, tuple(unknown)
        self._row = start
        self._reads: deque[tuple[RowGroupRead, ArrivingRowGroup]] = deque()
        self._taken = None if taken is None else [taken[g.piece] for g in self._groups]
        self._columns = stored_columns(schema, carried)
        self._arriving: Iterator[ArrivingRowGroup] = iter(())
        self._reader: RowGroupReader | StoredRowGroups | None = None
        if self._groups:
            sizes = self._taken or expanded_sizes(self._groups, schema, plan)
            order = row_group_reads(seed, stream, sizes, start, shuffle)
            if not shuffle:
                order = itertools.islice(order, len(sizes))
            self._arriving = self._noted(ahead.follow(order, lambda read: self._groups[read.group]))

    @property
    def step(self) -> int:
        """The step that the next row belongs to."""
        return self._row // self._assembler.rows_each

    def _noted(self, followed: Iterator[tuple[RowGroupRead, ArrivingRowGroup]]) -> Iterator[ArrivingRowGroup]:
        for read, arriving in followed:
            self._reads.append((read, arriving))
            yield arriving

    def __iter__(self) -> Iterator[int]:
        # Here, in the stream's own thread: the reader waits for the first file.
        reader = RowGroupReader if self._taken is None else StoredRowGroups
        self._reader = reader(self._columns, self._arriving)
        for stored in self._reader:
            read, arriving = self._reads.popleft()
            with stored:
                self._write(stored, read, arriving.group)
            arriving.release()
            yield self.step

    def _write(self, stored: StoredRowGroup, read: RowGroupRead, group: RowGroup) -> None:
        n = stored.num_rows
        order = np.arange(n, dtype=np.int32)
        if self._shuffle:
            order = row_order(self._seed, read.epoch, self._stream, read.group, n)
            order = order if self._taken is None else order[: self._taken[read.group]]
        copies = None if self._plan is None else _WithNegatives(stored, self._schema, order, self._plan)
        all_places = order if copies is None else copies.order
        places = all_places[read.skip :]
        slices = self._assembler.slices(self._place, self._row, len(places))
        targets = [
            OutputColumns([m[:, s.rows] for m, s in zip(matrices, slices, strict=True)])
            for matrices in (
                [s.batch.continuous for s in slices],
                [s.batch.codes for s in slices],
                [s.batch.labels for s in slices],
            )
        ]
        place = f"{group.path}, row group {group.index}"
        jagged = write_features(stored, self._schema, places, *targets, place=place)
        for name, lists in jagged.items():
            self._write_lists(name, lists, slices)
        if copies is not None:
            generator = negatives_generator(self._seed, read.epoch, self._stream, read.group)
            copies.draw(generator, read.skip, targets[1], targets[2])
        if self._unknown:
            generator = unknown_generator(self._seed, read.epoch, self._stream, read.group)
            for ids in self._unknown:
                ids.write(generator, len(all_places), read.skip, targets[1])
        for name in self._carried:
            self._write_carried(name, stored.values(name)[places], slices)
        self._row += len(places)
        self._assembler.mark_written(slices)

    def _write_carried(self, name: str, values: Array, slices: list[BatchSlice]) -> None:
        row = 0
        for part in slices:
            end = row + part.rows.stop - part.rows.start
            part.batch.carried.setdefault(name, {}).setdefault(self._place, []).append(values[row:end])
            row = end

    def _write_lists(self, name: str, lists: JaggedArray, slices: list[BatchSlice]) -> None:
        row = 0
        for part in slices:
            end = row + part.rows.stop - part.rows.start
            part.batch.jagged.setdefault(name, {}).setdefault(self._place, []).append(lists.rows(row, end))
            row = end

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _WithNegatives:
    """The rows of a row group with their negatives right after each positive."""

    def __init__(self, stored: StoredRowGroup, schema: DatasetSchema, order: Order, plan: NegativeSampler) -> None:
        self._plan = plan
        labels = stored.values(schema.label.name)[order]
        copies = plan.copies(labels)
        #: Rows in order, each repeated for its negatives.
        self.order = np.repeat(order, copies)
        self._is_copy = np.ones(len(self.order), bool)
        self._is_copy[np.cumsum(copies) - copies] = False
        self._column = plan.column
        names = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
        positive = order[labels > 0]
        self._positive_codes = stored.values(names[plan.column])[positive].astype(np.int64)
        self._users = None if plan.user is None else stored.values(names[plan.user])[positive].astype(np.int64)

    def draw(self, generator: np.random.Generator, skip: int, codes: OutputColumns, labels: OutputColumns) -> None:
        """Give the copies, from row `skip` on, other codes and the label 0."""
        drawn = np.empty(len(self.order), np.int64)
        drawn[self._is_copy] = self._plan.draw(self._positive_codes, generator, self._users).reshape(-1)
        row = skip
        for code, label in zip(codes.views, labels.views, strict=True):
            part = slice(row, row + code.shape[1])
            is_copy = self._is_copy[part]
            code[self._column, is_copy] = drawn[part][is_copy]
            label[0, is_copy] = 0.0
            row = part.stop


_GROUPS, _ROWS, _NEGATIVES, _UNKNOWN = 0, 1, 2, 3
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RowGroupRead:
    """One reading of a row group: which of the stream's groups, in which epoch, and how many rows to pass over."""

    epoch: int
    group: int
    skip: int


def row_group_reads(
    seed: int, stream: int, sizes: Sequence[int], start: int = 0, shuffle: bool = True
) -> Iterator[RowGroupRead]:
    """Yield all readings from row `start` of the endless stream on, without a visit to the row groups before it.

    Args:
        sizes: rows of each of the stream's row groups, all above 0.
        start: rows already delivered, over all epochs.
    """
    epoch, skip = divmod(start, sum(sizes))
    while True:
        for group in group_order(seed, epoch, stream, len(sizes)) if shuffle else range(len(sizes)):
            if skip >= sizes[group]:
                skip -= sizes[group]
                continue
            yield RowGroupRead(epoch, int(group), skip)
            skip = 0
        epoch += 1


def group_order(seed: int, epoch: int, stream: int, groups: int) -> npt.NDArray[np.int64]:
    """Return the order of a stream's row groups in one epoch."""
    return _generator(seed, epoch, stream, _GROUPS).permutation(groups)


def row_order(seed: int, epoch: int, stream: int, group: int, rows: int) -> npt.NDArray[np.int32]:
    """Return the order of the rows inside one row group in one epoch."""
    return native.permutation(_generator(seed, epoch, stream, _ROWS, group), rows)


def negatives_generator(seed: int, epoch: int, stream: int, group: int) -> np.random.Generator:
    """Return the random generator of the negatives of one row group in one epoch."""
    return _generator(seed, epoch, stream, _NEGATIVES, group)


def unknown_generator(seed: int, epoch: int, stream: int, group: int) -> np.random.Generator:
    """Return the random generator that chooses which ids of one row group are unknown in one epoch."""
    return _generator(seed, epoch, stream, _UNKNOWN, group)


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed & _MASK, *key]))
