"""Rows of older datasets among the rows of each step (`retrain.replay`), drawn as the datasets are read.

What is drawn is a function of the seed: of each older row group so many rows, in an order of each pass's own. A pass
over all of them gives about as many rows as a training wants, evenly of all days, and none of them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

import numpy as np

from headrace.dataset.loader.batch import Batch
from headrace.dataset.loader.loaders import ReplayLoader, TrainLoader
from headrace.dataset.parquet.layout import SplitLayout
from headrace.jagged import concatenated


@dataclass(frozen=True)
class ReplayRows:
    """Which rows are replayed.

    layout: the row groups of all older days, in the days' order; taken: of each row group, by its piece, the rows of a
    pass; batch_rows: rows of a step over all ranks, a multiple of the streams; seed: of what is drawn.
    """

    layout: SplitLayout
    taken: tuple[int, ...]
    batch_rows: int
    seed: int

    @staticmethod
    def of(
        days: Sequence[SplitLayout], rows: int, batch_rows: int, by: Literal["row", "day"], streams: int, seed: int
    ) -> ReplayRows:
        """Plan a pass of about `rows` rows; of all, where there are fewer.

        Args:
            days: a split of each day, row groups in all at least as many as streams.
            rows: rows that a training wants.
            batch_rows: rows of a step.
            by: row: each row is as likely as any other; day: each day gives as many rows, as far as it has them.
            streams: each draws from row groups of its own, as many rows as the others.
            seed: of what is drawn.
        """
        found = [(group, day.rows) for day in days for group in day.row_groups]
        sizes = np.array([group.rows for group, _ in found])
        weights = sizes / np.array([of_day for _, of_day in found]) if by == "day" else sizes.astype(np.float64)
        wanted = np.empty(len(found))
        for i in range(streams):
            mine = slice(i, None, streams)
            wanted[mine] = weights[mine] / weights[mine].sum() * (rows / streams)
        taken = np.clip(np.rint(wanted), 1, sizes).astype(int)
        groups = tuple(replace(group, piece=i) for i, (group, _) in enumerate(found))
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
    """The rows of both, in this order."""
    return Batch(
        # Column by column in memory, as each of them is.
        np.concatenate([first.continuous.T, second.continuous.T], axis=1).T,
        np.concatenate([first.codes.T, second.codes.T], axis=1).T,
        np.concatenate([first.labels, second.labels]),
        {name: np.concatenate([values, second.carried[name]]) for name, values in first.carried.items()},
        {name: concatenated([rows, second.lists[name]], rows.values.dtype) for name, rows in first.lists.items()},
    )
