"""Which rows of tables a task looks up: its users and their items, or whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.joined import needed_codes, null_codes, united_codes
from headrace.models.predictor import Predictor, network_of
from headrace.score.rank.blocks import ITEMS, Candidates, TaskInputs
from headrace.score.rank.pair_features import Columns, PairFeatures, gather, take_rows
from headrace.score.rank.rows import features_of_rows
from headrace.storage import Location

#: Items, or pairs, that are looked at at a time.
_ROWS = 65_536

Codes = Mapping[str, NDArray[np.int64]]


class JoinedModel(Protocol):
    """What a task says of its model."""

    @property
    def model(self) -> Location:
        """The saved model's folder."""
        ...

    @property
    def joined(self) -> frozenset[str]:
        """The tables whose rows it is given."""
        ...

    def load(self) -> tuple[Predictor, FittedWorkflow]:
        """The model, opened once in each process."""
        ...


class CodesOf(Protocol):
    """Finds the codes, or raw ids, of joined tables that batches look up."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at a batch of what a task works on."""
        ...

    def found(self) -> dict[str, NDArray[np.int64]]:
        """By table: int64, ascending."""
        ...


class SeenCodes:
    """The codes of joined tables that features have been seen to look up.

    Args:
        task: the joined tables. The model is opened where it is not.
    """

    def __init__(self, task: JoinedModel) -> None:
        predictor, self.fitted = task.load()
        network = network_of(predictor)
        assert network is not None
        self._model, self._joined = network.model, task.joined
        #: Of nulls always: a side's vectors are asked for without the other side.
        self._parts: list[Codes] = [null_codes(self._model, self._joined)]

    def add(self, columns: Columns) -> None:
        """Look at features of some rows."""
        self._parts = [united_codes([*self._parts, needed_codes(self._model, self._joined, columns)])]

    def found(self) -> dict[str, NDArray[np.int64]]:
        """By table: int64, ascending."""
        self._parts = [united_codes(self._parts)]
        return dict(self._parts[0])


class CodesOfRows:
    """The codes, or raw ids, of whole rows, by joined table.

    Args:
        task: the joined tables. The model is opened where it is not.
        context: constants for columns that the rows lack.
    """

    def __init__(self, task: JoinedModel, context: Mapping[str, pa.Scalar]) -> None:
        self._codes, self._context = SeenCodes(task), context

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at rows with the columns that the features read, and perhaps others."""
        for columns in features_of_rows(self._codes.fitted, batch, self._context):
            self._codes.add(columns)

    def found(self) -> dict[str, NDArray[np.int64]]:
        """By table: int64, ascending."""
        return self._codes.found()


class CodesOfUsers:
    """The codes, or raw ids, of some users, of some items and of pairs of both, by joined table.

    Args:
        task: its items, their features and the joined tables. The model is opened where it is not.
    """

    def __init__(self, task: TaskInputs) -> None:
        self._task, self._codes = task, SeenCodes(task)
        self._features = PairFeatures(task.user_columns, task.item_names, task.context, self._codes.fitted)
        self._items: list[NDArray[np.int32]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at users (the key, the user's columns, perhaps `__items`) and all that they are to be scored with."""
        if ITEMS in batch.schema.names:
            lists = Candidates.of(batch)
            self.add_pairs(batch, lists.lengths, lists.items)
        else:
            self.add_first_items(batch, self._task.items.rows)

    def add_first_items(self, users: pa.RecordBatch, count: int) -> None:
        """Look at users with the first items: so many of each, all items at most."""
        n, count = users.num_rows, min(count, self._task.items.rows)
        self.add_pairs(users, np.full(n, count, np.int64), np.tile(np.arange(count, dtype=np.int32), n))

    def add_pairs(self, users: pa.RecordBatch, lengths: NDArray[np.int64], items: NDArray[np.int32]) -> None:
        """Look at users and their items.

        Args:
            users: the key and the user's columns, [n].
            lengths: how many items each has, [n], N in all.
            items: rows of items, [N].
        """
        features = self._features
        self._codes.add(features.user_columns(users))
        self._items = [np.unique(np.concatenate([*self._items, items]))]
        if not features.of_pair:
            return
        own = users.select([c for c in features.user if c in users.schema.names])
        of_pair = np.repeat(np.arange(users.num_rows, dtype=np.int32), lengths)
        for start in range(0, len(items), _ROWS):
            rows = items[start : start + _ROWS]
            parts = [self._task.items.take(c, rows) for c in features.item_parts]
            things = pa.RecordBatch.from_arrays(parts, list(features.item_parts))
            self._codes.add(features.cross_columns(take_rows(own, of_pair[start : start + _ROWS]), things))

    def found(self) -> dict[str, NDArray[np.int64]]:
        """By table: int64, ascending."""
        of_items = self._task.item_features.open()
        for items in self._items:
            for start in range(0, len(items), _ROWS):
                rows = items[start : start + _ROWS]
                self._codes.add(gather({}, of_items, rows[:0], rows))
        self._items = []
        return self._codes.found()
