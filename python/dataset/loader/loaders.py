"""Batches of a split for one rank, in an order that does not depend on the number of ranks.

A split is read as `streams` logical streams (stream i is Petastorm's shard i: every `streams`-th row group). A step's
global batch is batch_size/streams rows of each stream, side by side; rank r of W owns streams [r*S/W, (r+1)*S/W). So
any W that divides `streams` sees the same batches in the same order, and a run can go on with another W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from headrace import config
from headrace.dataset.loader.assembler import BatchAssembler, run_streams
from headrace.dataset.loader.batch import Batch
from headrace.dataset.loader.candidates import CandidateSampler
from headrace.dataset.loader.matrices import MatrixColumns
from headrace.dataset.loader.negatives import NegativeSampler, expanded_sizes
from headrace.dataset.loader.stream import Stream
from headrace.dataset.loader.unknown import UnknownIds
from headrace.dataset.parquet.layout import SplitLayout, check_streams, split_of
from headrace.dataset.parquet.read_ahead import ReadAhead
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema, Kind
from headrace.workspace import Workspace
from headrace.world import World

_ALONE = World()
#: Of evaluation.
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
        mine = streams_of(world, streams)
        self._ahead = ReadAhead(len(mine), read_ahead_mib)
        sizes = [[g.rows for g in layout.stream(i, streams)] for i in mine]
        largest = max((rows for groups in sizes for rows in groups), default=1)
        self._assembler = BatchAssembler(
            MatrixColumns(schema.of(Kind.CONTINUOUS)),
            schema.of(Kind.CATEGORICAL),
            carried,
            rows_each,
            None if shuffle else [sum(groups) for groups in sizes],
            len(mine),
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
            for place, number in enumerate(mine)
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
        timed: is given the reading of row groups, to note how long each takes.
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
        plan = NegativeSampler.of(schema, train.negatives, layout)
        #: Rows of an epoch, negatives included.
        self.rows = sum(expanded_sizes(layout.row_groups, schema, plan))
        #: An epoch is this many whole batches; what is left over comes first in the next one's.
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
            unknown=UnknownIds.of(schema, train.unknown_rate),
        )

    @staticmethod
    def from_manifest(
        manifest: Manifest, ws: Workspace, train: config.Train, world: World = _ALONE, *, start_step: int = 0
    ) -> TrainLoader:
        """The `train` split of the dataset that a features manifest names."""
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
    """An endless iterator of this rank's rows of each step that are replayed (headrace.dataset.loader.replay).

    Args:
        layout: row groups of older datasets, at least as many as `train.streams`.
        schema: whose columns are read: the day's.
        train: its streams and unknown_rate are obeyed.
        batch_rows: rows of a step over all ranks.
        taken: of each row group, by its piece, the rows of a pass.
        seed: of what is drawn.
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
            unknown=UnknownIds.of(schema, train.unknown_rate),
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
    """The streams that a rank owns: consecutive ones, so that ranks in order hold streams in order.

    Raises:
        ValueError: the number of ranks does not divide `streams` (the spec refuses that too).
    """
    if streams % world.size:
        raise ValueError(f"{world.size} ranks do not divide {streams} streams")
    each = streams // world.size
    return range(world.rank * each, (world.rank + 1) * each)
