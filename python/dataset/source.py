"""Batches of a split for one rank, in an order that does not depend on the number of ranks.

A split is read as `streams` logical streams (stream i is Petastorm's shard i: every `streams`-th row group). A step's
global batch is batch_size/streams rows of each stream, side by side; rank r of W owns streams [r*S/W, (r+1)*S/W). So
any W that divides `streams` sees the same batches in the same order, and a run can go on with another W.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import config
from headrace.dataset import lists
from headrace.dataset.batch import Batch, concat
from headrace.dataset.layout import RowGroup, SplitLayout, check_streams, columns_of, split_of, stored_columns
from headrace.dataset.negatives import NegativePlan, expanded_sizes
from headrace.dataset.order import Visit, negatives_generator, row_order, visits
from headrace.dataset.prefetch import Prefetch
from headrace.dataset.reader import RowGroupReader
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema, Feature, Kind
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
            _Stream(layout, schema, train.seed, i, train.streams, plan, carried, start_step * rows_each, shuffle=True)
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
            _Stream(layout, schema, 0, i, streams, None, carried, 0, shuffle=False) for i in streams_of(world, streams)
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


def _steps(streams: Sequence[_Stream], rows_each: int) -> Iterator[Batch]:
    while True:
        yield concat([part for stream in streams for part in stream.take(rows_each)])


class _Stream:
    """One stream: row groups in turn, rows given out in portions of any size."""

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
        self._portion: _Portion | None = None
        self._reader: RowGroupReader | None = None
        #: The next row group is decoded while this one is given out.
        self._tables: Prefetch[pa.Table] | None = None
        if self._groups:
            sizes = expanded_sizes(self._groups, schema, plan)
            order = visits(seed, stream, sizes, start, shuffle)
            if not shuffle:
                order = itertools.islice(order, len(sizes))
            mine, pieces = layout.alone(self._groups)
            self._reader = RowGroupReader(mine, stored_columns(schema, carried), self._pieces(order, pieces))
            self._tables = Prefetch(self._reader, depth=1)

    def _pieces(self, order: Iterator[Visit], pieces: Sequence[int]) -> Iterator[int]:
        for visit in order:
            self._visits.append(visit)
            yield pieces[visit.group]

    def take(self, rows: int) -> list[Batch]:
        """The next `rows` rows, in parts that are views; fewer, down to 0, at the end of a finite stream."""
        parts: list[Batch] = []
        while rows:
            if self._portion is None or self._portion.left == 0:
                self._portion = self._next_portion()
                if self._portion is None:
                    break
            part = self._portion.take(rows)
            rows -= part.rows
            parts.append(part)
        return parts or [_empty(self._schema, self._carried)]

    def _next_portion(self) -> _Portion | None:
        table = None if self._tables is None else next(self._tables, None)
        if table is None:
            return None
        visit = self._visits.popleft()
        group = self._groups[visit.group]
        stored = to_batch(table, self._schema, self._carried, group)
        if not self._shuffle:
            return _Portion(stored, visit.skip)
        order = row_order(self._seed, visit.epoch, self._stream, visit.group, stored.rows)
        if self._plan is None:
            return _Portion(stored.rows_at(order), visit.skip)
        generator = negatives_generator(self._seed, visit.epoch, self._stream, visit.group)
        return _Portion(with_negatives(stored, order, self._plan, generator), visit.skip)

    def close(self) -> None:
        if self._tables is not None and self._reader is not None:
            self._tables.close()
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


def with_negatives(
    stored: Batch, order: npt.NDArray[np.int64], plan: NegativePlan, generator: np.random.Generator
) -> Batch:
    """The rows of `stored` in the given order, each positive followed by its negatives."""
    labels = stored.labels[order]
    copies = plan.copies(labels)
    is_copy = np.ones(int(copies.sum()), bool)
    is_copy[np.cumsum(copies) - copies] = False
    own = stored.codes[order[labels > 0], plan.column].astype(np.int64)
    found = stored.rows_at(np.repeat(order, copies))
    found.codes[is_copy, plan.column] = plan.draw(own, generator).reshape(-1)
    found.labels[is_copy] = 0.0
    return found


def to_batch(
    table: pa.Table, schema: DatasetSchema, carried: Sequence[str] = (), group: RowGroup | None = None
) -> Batch:
    """A table of stored columns as matrices, lists padded; `codes` keep their stored width here.

    Raises:
        UserError: a null in a feature, a list above its length, or a code outside [0, cardinality). Raw ids may be any.
    """
    where = "dataset" if group is None else f"{group.path}, row group {group.index}"
    continuous = _matrix(table, schema.of(Kind.CONTINUOUS), np.float32, where)
    categorical = schema.of(Kind.CATEGORICAL)
    codes = _matrix(table, categorical, np.int32 if _narrow(table, schema) else np.int64, where)
    limits = np.array([f.cardinality or 0 for f in categorical for _ in f.physical], np.int64)
    bound = np.array([not f.dynamic for f in categorical for _ in f.physical], bool)
    low, high = (codes.min(axis=0), codes.max(axis=0)) if codes.size else (limits, limits - 1)
    wrong = bound & ((low < 0) | (high >= limits))
    if codes.size and wrong.any():
        column = int(np.argmax(wrong))
        raise UserError(
            f"{where}: column '{columns_of(categorical)[column]}' has codes {low[column]}..{high[column]}, outside its "
            f"vocabulary [0, {limits[column]}). Delete the dataset's folder and run the features stage again"
        )
    labels = _matrix(table, (schema.label,), np.float32, where)[:, 0]
    extra = {name: table.column(name).to_numpy() for name in carried}
    return Batch(continuous, codes, labels, extra)


def _narrow(table: pa.Table, schema: DatasetSchema) -> bool:
    types = (table.schema.field(f.name).type for f in schema.of(Kind.CATEGORICAL))
    return all((t.value_type if pa.types.is_list(t) else t) == pa.int32() for t in types)


def _matrix(table: pa.Table, features: Sequence[Feature], dtype: type, where: str) -> npt.NDArray[Any]:
    # Column by column in memory, as the file is: a copy a column, where rows would scatter each of its numbers.
    found: npt.NDArray[Any] = np.empty((len(columns_of(features)), table.num_rows), dtype).T
    at = 0
    for feature in features:
        column = table.column(feature.name)
        if feature.is_list:
            lists.pad(column, found[:, at : at + feature.length], f"{where}: column '{feature.name}'")
        elif column.null_count:
            raise UserError(f"{where}: column '{feature.name}' has {column.null_count} nulls, which a model cannot "
                            f"read; add fill_missing to its operators in features.workflow")  # fmt: skip
        else:
            found[:, at] = column.to_numpy()
        at += len(feature.physical)
    return found


def _empty(schema: DatasetSchema, carried: Sequence[str]) -> Batch:
    c, s = (len(columns_of(schema.of(k))) for k in (Kind.CONTINUOUS, Kind.CATEGORICAL))
    return Batch(
        np.empty((0, c), np.float32), np.empty((0, s), np.int64), np.empty(0, np.float32),
        {name: np.empty(0) for name in carried},
    )  # fmt: skip
