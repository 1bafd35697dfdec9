"""Which rows of tables the users of a task, and their items, look up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.models.joined import needed_codes, null_codes, united_codes
from headrace.models.predictor import network_of
from headrace.score.rank.blocks import TaskInputs
from headrace.score.rank.pair_features import Columns, PairFeatures, gather, take_rows

#: Items, or pairs, that are looked at at a time.
_ROWS = 65_536

Codes = Mapping[str, NDArray[np.int64]]


class NeededCodes:
    """The codes, or raw ids, of some users, of some items and of pairs of both, by joined table.

    Args:
        task: its items, their features and the joined tables. The model is opened where it is not.
    """

    def __init__(self, task: TaskInputs) -> None:
        predictor, fitted = task.load()
        network = network_of(predictor)
        assert network is not None
        self._task, self._model = task, network.model
        self._features = PairFeatures(task.user_columns, task.item_names, task.context, fitted)
        #: Of nulls always: a side's vectors are asked for without the other side.
        self._parts: list[Codes] = [null_codes(self._model, task.joined)]
        self._items: list[NDArray[np.int32]] = []

    def add(self, users: pa.RecordBatch, lengths: NDArray[np.int64], items: NDArray[np.int32]) -> None:
        """Look at users and their items.

        Args:
            users: the key and the user's columns, [n].
            lengths: how many items each has, [n], N in all.
            items: rows of items, [N].
        """
        features = self._features
        self._add(features.user_columns(users))
        self._items = [np.unique(np.concatenate([*self._items, items]))]
        if not features.of_pair:
            return
        own = users.select([c for c in features.user if c in users.schema.names])
        of_pair = np.repeat(np.arange(users.num_rows, dtype=np.int32), lengths)
        for start in range(0, len(items), _ROWS):
            rows = items[start : start + _ROWS]
            parts = [self._task.items.take(c, rows) for c in features.item_parts]
            things = pa.RecordBatch.from_arrays(parts, list(features.item_parts))
            self._add(features.cross_columns(take_rows(own, of_pair[start : start + _ROWS]), things))

    def found(self) -> dict[str, NDArray[np.int64]]:
        """By table: int64, ascending."""
        of_items = self._task.item_features.open()
        for items in self._items:
            for start in range(0, len(items), _ROWS):
                rows = items[start : start + _ROWS]
                self._add(gather({}, of_items, rows[:0], rows))
        self._items = []
        self._parts = [united_codes(self._parts)]
        return dict(self._parts[0])

    def _add(self, columns: Columns) -> None:
        self._parts = [united_codes([*self._parts, needed_codes(self._model, self._task.joined, columns)])]
