"""Batches of a split for one rank, in an order that does not depend on the number of ranks.

A split is read as `streams` logical streams (stream i is Petastorm's shard i: every `streams`-th row group). A step's
global batch is batch_size/streams rows of each stream, side by side; rank r of W owns streams [r*S/W, (r+1)*S/W). So
any W that divides `streams` sees the same batches in the same order, and a run can go on with another W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

import numpy as np

from headrace import config
from headrace.comm import World
from headrace.compute.jagged import concatenated
from headrace.config.schema import DatasetSchema, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch, BatchAssembler, MatrixColumns, run_streams
from headrace.dataset.candidates import CandidateSampler
from headrace.dataset.layout import SplitLayout, check_streams, split_of
from headrace.dataset.negatives import NegativeSampler, UnknownIds, expanded_sizes
from headrace.dataset.row_groups import ReadAhead
from headrace.dataset.stream import Stream
from headrace.stage.manifest import Manifest

_ALONE = World()
#: Read-ahead of an evaluation, in MiB.
_READ_AHEAD_MIB = config.Train.model_fields["read_ahead_mib"].default
Timed = Callable[[str, Iterator[int]], Iterator[int]]


class _Loader:
    """Batches from a rank's streams, each with a thread of its own."""

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        seed: int,
        world: World,
        *,
        rows_each: int,
        streams: int,
        plan: NegativeSampler | None,
        carried: Sequence[str],
        start_step: int,
        shuffle: bool,
        depth: int,
        timed: Timed,
        read_ahead_mib: int,
        taken: Sequence[int] | None = None,
        unknown: Sequence[UnknownIds] = (),
    ) -> None:
        own_streams = streams_of(world, streams)
        self._ahead = ReadAhead(len(own_streams), read_ahead_mib)
        sizes = [[g.rows for g in layout.stream(i, streams)] for i in own_streams]
        largest = max((rows for groups in sizes for rows in groups), default=1)
        self._assembler = BatchAssembler(
            MatrixColumns(schema.of(Kind.CONTINUOUS)),
            schema.of(Kind.CATEGORICAL),
            carried,
            rows_each,
            None if shuffle else [sum(groups) for groups in sizes],
            len(own_streams),
            start_step,
            # A row group is read while the one before it is used.
            ahead=max(depth, -(-largest // rows_each)),
        )
        self._streams = [
            Stream(
                layout,
                schema,
                seed,
                number,
                streams,
                plan,
                carried,
                start_step * rows_each,
                shuffle=shuffle,
                assembler=self._assembler,
                place=place,
                ahead=self._ahead,
                taken=taken,
                unknown=unknown,
            )
            for place, number in enumerate(own_streams)
        ]
        self._threads = run_streams(
            self._assembler, [iter(s) for s in self._streams], [s.step for s in self._streams], timed
        )

    @property
    def wait_seconds(self) -> float:
        """Seconds for which the loop waited for data."""
        return self._assembler.wait_seconds

    def close(self) -> None:
        self._assembler.close()
        self._ahead.close()
        for thread in self._threads:
            thread.join()
        for stream in self._streams:
            stream.close()


class TrainLoader(_Loader):
    """An endless iterator of this rank's part of each step's batch; wraps from epoch to epoch.

        with TrainLoader.from_manifest(manifest, ws, spec.train, world) as source:
            for step, batch in zip(range(source.steps_per_epoch), source): ...

    Args:
        layout: the split (`open_split`).
        train: its batch_size, streams, seed, negatives and unknown_rate are obeyed.
        start_step: begin as if this many steps had been taken; row groups before it are not decoded.
        depth: batches prepared ahead, at least.
        timed: wraps the iterators that read row groups, to measure their time.
        candidates: draws items for the rows of each batch; None: `Batch.negatives` stays None.

    Raises:
        UserError: fewer row groups than streams, a damaged file, nulls or codes outside their vocabulary.
    """

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        train: config.Train,
        world: World = _ALONE,
        *,
        start_step: int = 0,
        carried: Sequence[str] = (),
        depth: int = 4,
        timed: Timed = lambda name, items: items,
        candidates: CandidateSampler | None = None,
    ) -> None:
        check_streams(layout, train.streams)
        self._candidates, self._step = candidates, start_step
        self._first_row = world.rank * (train.batch_size // world.size)
        plan = NegativeSampler.from_config(schema, train.negatives, layout)
        #: Rows of an epoch, negatives included.
        self.rows = sum(expanded_sizes(layout.row_groups, schema, plan))
        #: Full batches of an epoch; the remaining rows come first in the next epoch.
        self.steps_per_epoch = max(1, self.rows // train.batch_size)
        super().__init__(
            layout,
            schema,
            train.seed,
            world,
            rows_each=train.batch_size // train.streams,
            streams=train.streams,
            plan=plan,
            carried=carried,
            start_step=start_step,
            shuffle=True,
            depth=depth,
            timed=timed,
            read_ahead_mib=train.read_ahead_mib,
            unknown=UnknownIds.from_rates(schema, train.unknown_rate),
        )

    @staticmethod
    def from_manifest(
        manifest: Manifest, ws: Workspace, train: config.Train, world: World = _ALONE, *, start_step: int = 0
    ) -> TrainLoader:
        """Return the `train` split of the dataset that a features manifest names."""
        layout, schema = split_of(manifest, ws, "train")
        return TrainLoader(layout, schema, train, world, start_step=start_step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch, step = self._assembler.take(), self._step
        self._step += 1
        if self._candidates is None:
            return batch
        drawn = self._candidates.draw(step, self._first_row, self._assembler.rows_each, batch)
        return replace(batch, negatives=drawn)

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ReplayLoader(_Loader):
    """An endless iterator of this rank's replayed rows of each step.

    Args:
        layout: row groups of older datasets, at least as many as `train.streams`.
        schema: that of the day's dataset, whose columns are read.
        train: its streams and unknown_rate are obeyed.
        batch_rows: rows of a step over all ranks.
        taken: by piece, rows of each row group in a pass.
        seed: of the draws.
        start_step: begin as if this many steps had been taken.
        carried: carried columns to read along.

    Raises:
        UserError: a damaged file, nulls or codes outside their vocabulary.
    """

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        train: config.Train,
        world: World = _ALONE,
        *,
        batch_rows: int,
        taken: Sequence[int],
        seed: int,
        start_step: int = 0,
        carried: Sequence[str] = (),
    ) -> None:
        super().__init__(
            layout,
            schema,
            seed,
            world,
            rows_each=batch_rows // train.streams,
            streams=train.streams,
            plan=None,
            carried=carried,
            start_step=start_step,
            shuffle=True,
            depth=4,
            timed=lambda name, items: items,
            read_ahead_mib=train.read_ahead_mib,
            taken=taken,
            unknown=UnknownIds.from_rates(schema, train.unknown_rate),
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._assembler.take()


class EvalLoader(_Loader):
    """One pass over a split: every row exactly once over all ranks, in stored order inside each stream.

    All ranks make `steps` steps, as collectives need; a rank whose streams have ended gives batches of 0 rows. A split
    may have fewer row groups than streams: then some streams are empty.

    Args:
        batch_size: rows of a step over all ranks.
        carried: carried columns to read along.

    Raises:
        UserError: as TrainLoader, except for the number of row groups.
    """

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        world: World = _ALONE,
        *,
        batch_size: int,
        streams: int,
        carried: Sequence[str] = (),
        depth: int = 4,
    ) -> None:
        rows_each = batch_size // streams
        longest = max(sum(g.rows for g in layout.stream(i, streams)) for i in range(streams))
        self.rows = layout.rows
        self.steps = -(-longest // rows_each)
        self._left = self.steps
        super().__init__(
            layout,
            schema,
            0,
            world,
            rows_each=rows_each,
            streams=streams,
            plan=None,
            carried=carried,
            start_step=0,
            shuffle=False,
            depth=depth,
            timed=lambda name, items: items,
            read_ahead_mib=_READ_AHEAD_MIB,
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        return self._assembler.take()

    def __enter__(self) -> EvalLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def streams_of(world: World, streams: int) -> range:
    """Return the streams that a rank owns: consecutive ones, so that ranks in order hold streams in order.

    Raises:
        ValueError: the number of ranks does not divide `streams` (the spec refuses that too).
    """
    if streams % world.size:
        raise ValueError(f"{world.size} ranks do not divide {streams} streams")
    each = streams // world.size
    return range(world.rank * each, (world.rank + 1) * each)


@dataclass(frozen=True)
class ReplayRows:
    """The rows that are replayed.

    layout: the row groups of all older days, in the days' order; taken: by piece, rows of each row group in a pass;
    batch_rows: rows of a step over all ranks, a multiple of the streams; seed: of the draws.
    """

    layout: SplitLayout
    taken: tuple[int, ...]
    batch_rows: int
    seed: int

    @staticmethod
    def plan(
        days: Sequence[SplitLayout], rows: int, batch_rows: int, by: Literal["row", "day"], streams: int, seed: int
    ) -> ReplayRows:
        """Plan a pass of about `rows` rows; of all, where there are fewer.

        Args:
            days: a split of each day, row groups in all at least as many as streams.
            rows: requested rows.
            batch_rows: rows of a step.
            by: `row`: all rows are equally likely; `day`: all days give equally many rows, as far as they have them.
            streams: number of streams; each draws equally many rows from row groups of its own.
            seed: of the draws.
        """
        groups_of_days = [(group, day.rows) for day in days for group in day.row_groups]
        sizes = np.array([group.rows for group, _ in groups_of_days])
        weights = (
            sizes / np.array([of_day for _, of_day in groups_of_days]) if by == "day" else sizes.astype(np.float64)
        )
        requested_rows = np.empty(len(groups_of_days))
        for i in range(streams):
            stream_groups = slice(i, None, streams)
            requested_rows[stream_groups] = weights[stream_groups] / weights[stream_groups].sum() * (rows / streams)
        taken = np.clip(np.rint(requested_rows), 1, sizes).astype(int)
        groups = tuple(replace(group, piece=i) for i, (group, _) in enumerate(groups_of_days))
        layout = SplitLayout("valid", tuple(group.path for group in groups), groups)
        return ReplayRows(layout, tuple(taken.tolist()), batch_rows, seed)


class WithReplay:
    """A TrainLoader whose batches have the rows of a ReplayLoader behind their own. Closes both.

    Args:
        rows: of the training split: each step has so many fewer than `train.batch_size`.
        replayed: rows of older days, from the same step on.
    """

    def __init__(self, rows: TrainLoader, replayed: ReplayLoader) -> None:
        self._rows, self._replayed = rows, replayed
        self.rows, self.steps_per_epoch = rows.rows, rows.steps_per_epoch

    @property
    def wait_seconds(self) -> float:
        """See TrainLoader."""
        return self._rows.wait_seconds + self._replayed.wait_seconds

    def __iter__(self) -> WithReplay:
        return self

    def __next__(self) -> Batch:
        return joined(next(self._rows), next(self._replayed))

    def __enter__(self) -> WithReplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._rows.close()
        self._replayed.close()


def joined(first: Batch, second: Batch) -> Batch:
    """Return the rows of both, in this order."""
    return Batch(
        # Column by column in memory, as each of them is.
        np.concatenate([first.continuous.T, second.continuous.T], axis=1).T,
        np.concatenate([first.codes.T, second.codes.T], axis=1).T,
        np.concatenate([first.labels, second.labels]),
        {name: np.concatenate([values, second.carried[name]]) for name, values in first.carried.items()},
        {name: concatenated([rows, second.lists[name]], rows.values.dtype) for name, rows in first.lists.items()},
    )
