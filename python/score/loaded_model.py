"""A saved model and its fitted workflow, loaded once in a process: features of pairs and rows, predictions of rows.

A feature says which columns it is made of. One that is made of the user's alone (and of constants) is computed once for
each user, not once for each candidate, and so is an item's: for 3,000 users and 200 items that is 3,200 rows to
transform in place of 600,000. Only features of both, such as a cross of user and item, are computed for each pair.
`check_pair_features` compares with the features of whole pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.compute.jagged import JaggedArray
from headrace.config.schema import Feature
from headrace.dataset import lists
from headrace.errors import UserError
from headrace.features.functions.arrays import one_batch
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.spark.gpus import gpu_addresses, show_assigned_gpu
from headrace.models.predictor import Predictor, load_predictor, maps_of
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace, on_this_host

#: Pairs in memory at once, whatever the number of users and items. Small enough for a DLRM's activations to
#: stay near the cache: 1.6 times the speed of 262,144 on one core, and 260 MB less at the peak.
BLOCK_PAIRS = 32_768
#: Features by name: one value per row [n], or lists.
Columns = dict[str, NDArray[Any] | JaggedArray]


@dataclass(frozen=True)
class PairFeatures:
    """Origin of each column that the features read."""

    user: tuple[str, ...]
    item: tuple[str, ...]
    context: Mapping[str, pa.Scalar]
    fitted: FittedWorkflow

    @cached_property
    def of_user(self) -> tuple[str, ...]:
        """Features that are made of the user's columns, and perhaps of the context."""
        return tuple(
            f.name for f in self.fitted.features if self._reads(f, self.user) and not self._reads(f, self.item)
        )

    @cached_property
    def of_pair(self) -> tuple[str, ...]:
        """Features that are made of columns of both."""
        return tuple(f.name for f in self.fitted.features if self._reads(f, self.user) and self._reads(f, self.item))

    @cached_property
    def of_item(self) -> tuple[str, ...]:
        """All others: the item's, and the context's, which is the same for every item."""
        taken = {*self.of_user, *self.of_pair}
        return tuple(f.name for f in self.fitted.features if f.name not in taken)

    @cached_property
    def item_parts(self) -> tuple[str, ...]:
        """The item's columns that features of pairs are made of."""
        read = {c for f in self.fitted.features if f.name in self.of_pair for c in f.sources}
        return tuple(c for c in self.item if c in read)

    def user_columns(self, batch: pa.RecordBatch) -> Columns:
        """Return features of users; `batch` has the key and the user's columns."""
        return self._columns(batch, self.of_user)

    def item_columns(self, batch: pa.RecordBatch) -> Columns:
        """Return features of items and the context; `batch` has the key and the item's columns."""
        return self._columns(batch, self.of_item)

    def cross_columns(self, users: pa.RecordBatch, items: pa.RecordBatch) -> Columns:
        """Return the features that are made of both sides, for pairs (row i: users[i], items[i]).

        Args:
            users: has the user's columns.
            items: has `item_parts` at least.
        """
        if not self.of_pair:
            return {}
        return self._columns(_side_by_side(users, items), self.of_pair)

    def pair_columns(self, users: pa.RecordBatch, items: pa.RecordBatch) -> Columns:
        """Return all features of pairs (row i: users[i], items[i]), transformed as whole rows like in training."""
        return self.row_columns(_side_by_side(users, items))

    def row_columns(self, rows: pa.RecordBatch) -> Columns:
        """Return all features of rows that have the columns of both sides."""
        return self._columns(rows, [f.name for f in self.fitted.features])

    def side_columns(self, batch: pa.RecordBatch, side: Literal["user", "item"]) -> Columns:
        """Return all features by a user or an item, and the context alone: those of the other side are empty.

        Args:
            batch: has the key and the side's columns.
            side: whose rows they are.
        """
        other_side = self.item if side == "user" else self.user
        known = [f.name for f in self.fitted.features if not self._reads(f, other_side)]
        columns = self._columns(batch, known)
        n = batch.num_rows
        for f in self.fitted.features:
            if f.name not in columns:
                zeros = np.zeros(n, f.dtype)
                columns[f.name] = JaggedArray(np.zeros(n + 1, np.int64), zeros[:0]) if f.is_list else zeros
        return columns

    @staticmethod
    def _reads(feature: Feature, side: Sequence[str]) -> bool:
        return not set(feature.sources).isdisjoint(side)

    def _columns(self, batch: pa.RecordBatch, names: Sequence[str]) -> Columns:
        """Return the requested features; inputs that `batch` lacks are the context's, or null."""
        arrays = []
        for name in self.fitted.input_columns:
            type_ = self.fitted.workflow.input_type(name).arrow
            if name in batch.schema.names:
                arrays.append(batch.column(name))
            elif name in self.context:
                arrays.append(pa.array([self.context[name].as_py()] * batch.num_rows, type_))
            else:
                arrays.append(pa.nulls(batch.num_rows, type_))
        inputs = pa.RecordBatch.from_arrays(arrays, list(self.fitted.input_columns))
        features = [f for f in self.fitted.features if f.name in names]
        transformed = zip(features, self.fitted.transform_lists(inputs, frozenset(names)), strict=True)
        return {f.name: JaggedArray(*lists.to_numpy(x)) if f.is_list else x.to_numpy(False) for f, x in transformed}


def gather(users: Columns, items: Columns, user_rows: NDArray[np.int32], item_rows: NDArray[np.int32]) -> Columns:
    """Return the features of pairs (user_rows[i], item_rows[i]) by side: [n] of each feature."""
    out = {name: _rows(x, user_rows) for name, x in users.items()}
    return out | {name: _rows(x, item_rows) for name, x in items.items()}


def _rows(x: NDArray[Any] | JaggedArray, rows: NDArray[np.int32]) -> NDArray[Any] | JaggedArray:
    return JaggedArray(*lists.take(x.offsets, x.values, rows)) if isinstance(x, JaggedArray) else x.take(rows)


def check_pair_features(
    features: PairFeatures, users: pa.RecordBatch, items: pa.RecordBatch, of_items: Columns | None = None
) -> None:
    """Compare features computed by side with those of whole pairs, to the bit, for all pairs of a few rows.

    Args:
        features: the columns of both sides.
        users: some users.
        items: the key and columns of some items.
        of_items: the features that were made of more items before, whose first are these; None: they are made here.

    Raises:
        RuntimeError: they differ: an operator looks at more columns than it says.
    """
    n, m = users.num_rows, items.num_rows
    i, j = np.repeat(np.arange(n, dtype=np.int32), m), np.tile(np.arange(m, dtype=np.int32), n)
    pair_users, pair_items = take_rows(users, i), take_rows(items, j)
    item_columns = features.item_columns(items) if of_items is None else of_items
    by_side = gather(features.user_columns(users), item_columns, i, j) | features.cross_columns(pair_users, pair_items)
    expected = features.pair_columns(pair_users, pair_items)
    for name, values in expected.items():
        if _as_bytes(by_side[name]) != _as_bytes(values):
            raise RuntimeError(f"feature '{name}' of a pair is not what its side alone gives: no pairs were scored")


def _as_bytes(x: NDArray[Any] | JaggedArray) -> bytes:
    return x.lengths.tobytes() + x.flat().tobytes() if isinstance(x, JaggedArray) else x.tobytes()


def _side_by_side(left: pa.RecordBatch, right: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*left.columns, *right.columns], [*left.schema.names, *right.schema.names])


def take_rows(batch: pa.RecordBatch, rows: NDArray[np.int32]) -> pa.RecordBatch:
    """Return some rows of a batch, in their order."""
    return one_batch(pa.Table.from_batches([batch]).take(pa.array(rows)))


@lru_cache(maxsize=1)
def loaded_model(
    folder: Location,
    threads: int,
    output: str | None,
    maps: HostPlace | None,
    gpu: bool = False,
    joined: frozenset[str] = frozenset(),
) -> tuple[Predictor, FittedWorkflow]:
    """Load a model once in each Python worker, which Spark keeps for its next tasks; a model's folder never changes.

    `maps`: what workers of a host map of models: see Workspace.mapped. None: nothing. `gpu`: the model goes to the GPU
    that Spark assigned to the task, where it stays. `joined`: see TaskInputs.

    Raises:
        UserError: the model is damaged; or there is no such GPU.
    """
    mapped_folder = None if maps is None else maps_of(folder, on_this_host(maps))
    device = _device() if gpu else "cpu"
    predictor = load_predictor(folder, threads, output, mapped_folder, device, joined)
    return predictor, loaded_workflow(folder, maps)


@lru_cache(maxsize=1)
def loaded_workflow(folder: Location, maps: HostPlace | None) -> FittedWorkflow:
    """Return the workflow that a saved model was trained on; `maps`: see `loaded_model`."""
    vocabularies = None if maps is None else maps_of(folder, on_this_host(maps)) / "vocabularies"
    return FittedWorkflow.load(folder / "workflow", maps=vocabularies)


def _device() -> str:
    """Return the GPU of this task and process for torch: an executor has one, and so its workers' tasks."""
    addresses = gpu_addresses()
    if not addresses:
        raise UserError("the tasks that score were to have a GPU each, and Spark assigned none to this one")
    show_assigned_gpu(addresses)
    return "cuda"


def features_of_rows(
    fitted: FittedWorkflow, batch: pa.RecordBatch, context: Mapping[str, pa.Scalar]
) -> Iterator[Columns]:
    """Yield the features of rows, in blocks of bounded size, in their order.

    Args:
        fitted: the workflow that the model was trained on.
        batch: the columns that the features read, and perhaps others.
        context: constants for columns that `batch` lacks.

    Raises:
        UserError: a column is missing or of another type.
    """
    missing = [c for c in fitted.input_columns if c not in batch.schema.names and c not in context]
    if missing:
        raise UserError(
            f"the features of the model read {', '.join(repr(c) for c in missing)}, which the rows lack "
            f"(they have: {', '.join(batch.schema.names)})"
        )
    features = PairFeatures(tuple(batch.schema.names), (), context, fitted)
    for start in range(0, batch.num_rows, BLOCK_PAIRS):
        yield features.row_columns(batch.slice(start, BLOCK_PAIRS))


def predict_rows(
    predictor: Predictor, fitted: FittedWorkflow, batch: pa.RecordBatch, context: Mapping[str, pa.Scalar]
) -> NDArray[np.float32]:
    """Return the model's prediction for each row, in blocks of bounded size: float32 [rows].

    Args:
        predictor: the model.
        fitted, batch, context: see `features_of_rows`.

    Raises:
        UserError: a column is missing or of another type, or the model gives what is no number.
    """
    parts = [predictor.predict(columns) for columns in features_of_rows(fitted, batch, context)]
    out = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not np.isfinite(out).all():
        raise UserError("the model gives scores that are no numbers; train it again (a lower rate?)")
    return out
