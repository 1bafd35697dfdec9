"""Batches of a split for one rank, in an order that does not depend on the number of ranks.

A split is read as `streams` logical streams (stream i is Petastorm's shard i: every `streams`-th row group). A step's
global batch is batch_size/streams rows of each stream, side by side; rank r of W owns streams [r*S/W, (r+1)*S/W). So
any W that divides `streams` sees the same batches in the same order, and a run can go on with another W.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from headrace import config
from headrace.dataset.batch import Batch, concat
from headrace.dataset.buffers import Buffers
from headrace.dataset.layout import SplitLayout, check_streams, split_of
from headrace.dataset.negatives import NegativePlan, expanded_sizes
from headrace.dataset.prefetch import Prefetch
from headrace.dataset.stream import Stream
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema
from headrace.workspace import Workspace
from headrace.world import World

_ALONE = World()


class TrainSource:
    """An endless iterator of this rank's part of each step's batch; wraps from epoch to epoch.

        with TrainSource.from_manifest(manifest, ws, spec.train, world) as source:
            for step, batch in zip(range(source.steps_per_epoch), source): ...

    Args:
        layout: the split (`open_split`).
        train: its batch_size, streams, seed and negatives are obeyed.
        start_step: begin as if this many steps had been taken; row groups before it are not decoded.
        depth: batches prepared ahead.
        timed: is given the batches where they are made, to note how long each takes.

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
        timed: Callable[[str, Iterator[Batch]], Iterator[Batch]] = lambda name, items: items,
    ) -> None:
        check_streams(layout, train.streams)
        plan = NegativePlan.of(schema, train.negatives)
        #: Rows of an epoch, negatives included.
        self.rows = sum(expanded_sizes(layout.row_groups, schema, plan))
        #: An epoch is this many whole batches; what is left over comes first in the next one's.
        self.steps_per_epoch = max(1, self.rows // train.batch_size)
        rows_each = train.batch_size // train.streams
        self._streams = [
            Stream(layout, schema, train.seed, i, train.streams, plan, carried, start_step * rows_each, shuffle=True)
            for i in streams_of(world, train.streams)
        ]
        self._batches = Prefetch(timed("decode", _steps(self._streams, rows_each)), depth)

    @staticmethod
    def from_manifest(
        manifest: Manifest,
        ws: Workspace,
        train: config.Train,
        world: World = _ALONE,
        *,
        start_step: int = 0,
    ) -> TrainSource:
        """The `train` split of the dataset that a features manifest names."""
        layout, schema = split_of(manifest, ws, "train")
        return TrainSource(layout, schema, train, world, start_step=start_step)

    @property
    def wait_seconds(self) -> float:
        """Seconds for which the loop waited for data."""
        return self._batches.wait_seconds

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()
        for stream in self._streams:
            stream.close()

    def __enter__(self) -> TrainSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class EvalSource:
    """One pass over a split: every row exactly once over all ranks, in stored order inside each stream.

    All ranks make `steps` steps, as collectives need; a rank whose streams have ended gives batches of 0 rows. A split
    may have fewer row groups than streams: then some streams are empty.

    Args:
        batch_size: rows of a step over all ranks.
        carried: carried columns to read along.

    Raises:
        UserError: as TrainSource, except for the number of row groups.
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
        self._streams = [
            Stream(layout, schema, 0, i, streams, None, carried, 0, shuffle=False) for i in streams_of(world, streams)
        ]
        self._batches = Prefetch(itertools.islice(_steps(self._streams, rows_each), self.steps), depth)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()
        for stream in self._streams:
            stream.close()

    def __enter__(self) -> EvalSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def streams_of(world: World, streams: int) -> range:
    """The streams that a rank owns: consecutive ones, so that ranks in order hold streams in order.

    Raises:
        ValueError: the number of ranks does not divide `streams` (the spec refuses that too).
    """
    if streams % world.size:
        raise ValueError(f"{world.size} ranks do not divide {streams} streams")
    each = streams // world.size
    return range(world.rank * each, (world.rank + 1) * each)


def _steps(streams: Sequence[Stream], rows_each: int) -> Iterator[Batch]:
    buffers = Buffers()
    while True:
        yield concat([part for stream in streams for part in stream.take(rows_each)], buffers)
