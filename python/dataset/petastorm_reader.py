"""Row groups by Petastorm, in an order that we give.

Petastorm's own shuffling orders row groups by a seed for the reader's whole life, so that a reader cannot start in the
middle of an epoch without decoding all before it. Its `Ventilator`, the object that says which row group comes next,
is an extension point: ours follows the iterator it is handed. With the pool that works in the caller's thread
("dummy") the order is exact and nothing can be lost; parallelism comes from a thread a stream (`run_streams`).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from headrace.dataset.petastorm_compat import (
    ArrowReaderWorker,
    DummyPool,
    EmptyResultError,
    LocalFiles,
    Reader,
    Ventilator,
)
from headrace.dataset.row_groups import ArrivingRowGroup, BufferPool, StoredRowGroup

# We give patterns of whole names, as it now takes them; it warns of every column whose name begins another's.
warnings.filterwarnings("ignore", "schema_fields behavior", UserWarning, r"petastorm\..*")
# Each reader says at INFO that the dataset is plain Parquet, which is what we write.
logging.getLogger("petastorm").setLevel(logging.WARNING)


class RowGroupReader:
    """Iterate over row groups of a split, in the order in which they arrive.

        for rows in RowGroupReader(["user_id", "label"], arriving): ...

    `arriving` may be endless; it is read one row group ahead. Values are read when a column is requested. The caller
    closes each row group. Petastorm learns the schema from the first one's file; it lists and opens no others.

    Raises:
        UserError: a file was damaged or removed since its footer was read.
    """

    def __init__(self, columns: Sequence[str], arriving: Iterator[ArrivingRowGroup]) -> None:
        first = next(arriving, None)
        if first is None:
            self._reader = None
            return
        # Raises what is wrong with the file in our words.
        first.open(columns, BufferPool()).close()
        self._reader = _OrderedReader(
            LocalFiles(),
            [str(first.path())],
            chain([first], arriving),
            # Petastorm takes patterns, matched against whole names.
            schema_fields=[re.escape(c) for c in columns],
            worker_class=_RowGroupWorker,
            reader_pool=DummyPool(),
            shuffle_row_groups=False,
            num_epochs=1,
            is_batched_reader=True,
        )

    def __iter__(self) -> Iterator[StoredRowGroup]:
        return self

    def __next__(self) -> StoredRowGroup:
        if self._reader is None:
            raise StopIteration
        row_group: StoredRowGroup = next(self._reader)
        return row_group

    def close(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader.join()


class _OrderedVentilator(Ventilator):  # type: ignore[misc]
    """Hands out row groups in the given order, one ahead, without a thread of its own.

    A "piece_index" is the row group itself: the pool works in the caller's thread, and pickles nothing.
    """

    def __init__(self, ventilate: Any, arriving: Iterator[ArrivingRowGroup]) -> None:
        super().__init__(ventilate)
        self._ventilate = ventilate
        self._arriving = arriving
        self._done = False

    def start(self) -> None:
        self._next()

    def processed_item(self) -> None:
        self._next()

    def _next(self) -> None:
        row_group = None if self._done else next(self._arriving, None)
        if row_group is None:
            self._done = True
        else:
            self._ventilate(piece_index=row_group, worker_predicate=None, shuffle_row_drop_partition=(0, 1))

    def completed(self) -> bool:
        return self._done

    def stop(self) -> None:
        self._done = True


class _OrderedReader(Reader):  # type: ignore[misc]
    """Petastorm's reader with our ventilator."""

    def __init__(self, filesystem: Any, paths: Any, arriving: Iterator[ArrivingRowGroup], **kwargs: Any) -> None:
        self._arriving = arriving
        super().__init__(filesystem, paths, **kwargs)

    def _create_ventilator(self, *args: Any, **kwargs: Any) -> Ventilator:
        return _OrderedVentilator(self._workers_pool.ventilate, self._arriving)


class _RowGroupWorker(ArrowReaderWorker):  # type: ignore[misc]
    """Petastorm's worker; it opens row groups with headrace.dataset.row_groups, to be read column by column.

    Petastorm's own opens each file twice, decodes all of it, and makes pandas series in a named tuple.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._buffers = BufferPool()

    @staticmethod
    def new_results_queue_reader() -> Any:
        return _ResultsQueueReader()

    def process(
        self, piece_index: ArrivingRowGroup, worker_predicate: None, shuffle_row_drop_partition: tuple[int, int]
    ) -> None:
        self.publish_func(piece_index.open(list(self._schema.fields), self._buffers))


class _ResultsQueueReader:
    batched_output = True

    def read_next(self, workers_pool: Any, schema: Any, ngram: Any) -> StoredRowGroup:
        try:
            row_group: StoredRowGroup = workers_pool.get_results()
        except EmptyResultError:
            raise StopIteration from None
        return row_group
