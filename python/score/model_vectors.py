"""Vectors of users or items from a saved model in retrieval form, by Spark tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from headrace.compute.jagged import JaggedArray
from headrace.config.schema import Kind
from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import NetworkPredictor, Predictor
from headrace.score.joined_tables import Partitioning
from headrace.score.loaded_model import Columns, PairFeatures, loaded_model
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

Side = Literal["user", "item"]

#: Rows in memory at once.
_ROWS = 8_192


@dataclass(frozen=True)
class ModelVectors:
    """A model in retrieval form and a side; small and picklable, so that tasks are given it as it is."""

    #: The saved model's folder, visible on every executor.
    model: Location
    threads: int
    side: Side
    user_columns: tuple[str, ...]
    item_columns: tuple[str, ...]
    context: dict[str, pa.Scalar]
    #: Where workers of a host map the model's tables (Workspace.mapped); None: each has them in its memory.
    maps: HostPlace | None = None
    #: Tables that are not mapped: a task receives their rows first (headrace.score.joined_rows).
    joined: frozenset[str] = frozenset()

    def vectors(self, batch: pa.RecordBatch) -> NDArray[np.float32]:
        """Return the vectors of some rows.

        Args:
            batch: the side's columns, and perhaps others.

        Returns:
            float32 [rows, D], finite.

        Raises:
            UserError: the model is in no retrieval form, or gives vectors that are not finite.
        """
        predictor, _ = self._loaded()
        parts = [predictor.vectors(columns, self.side) for columns in self.features_of(batch)]
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not np.isfinite(vectors).all():
            raise UserError(f"the model in {self.model} gives vectors that are not finite; train it again")
        return vectors

    def known_vectors(self, batch: pa.RecordBatch) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the vectors, and which rows have a known value: (float32 [rows, D], bool [rows]).

        A row whose vector is that of a row without any value, or with no value that training has met, is like all other
        such rows: a user whom a model of ids alone never saw, an item that is newer than the model.
        """
        vectors, unknown_vectors = self.vectors(batch), self._vectors_of_nothing()
        known = np.ones(len(vectors), np.bool_)
        scale = (
            np.abs(unknown_vectors).max(axis=1) if unknown_vectors.size else np.zeros(len(unknown_vectors), np.float32)
        )
        for row, largest in zip(unknown_vectors, scale, strict=True):
            # A tower's products may round differently in another batch.
            known &= np.abs(vectors - row).max(axis=1, initial=0) > 1e-5 * largest
        return vectors, known

    def features_of(self, batch: pa.RecordBatch) -> Iterator[Columns]:
        """Yield the features of some rows, a block at a time; one block at least."""
        _, features = self._loaded()
        for start in range(0, max(batch.num_rows, 1), _ROWS):
            yield features.side_columns(batch.slice(start, _ROWS), self.side)

    def features_of_nothing(self) -> tuple[Columns, Columns]:
        """Return the features of a row of nulls, and of a row of values that no vocabulary has."""
        _, features = self._loaded()
        nulls = features.side_columns(pa.RecordBatch.from_arrays([pa.nulls(1)], [""]), self.side)
        codes = {f.name for f in features.fitted.features if f.kind == Kind.CATEGORICAL and not f.is_list}
        return nulls, {name: _as_unknown(x) if name in codes else x for name, x in nulls.items()}

    def _vectors_of_nothing(self) -> NDArray[np.float32]:
        """Return the vectors of `features_of_nothing`: float32 [2, D]."""
        predictor, _ = self._loaded()
        return np.concatenate([predictor.vectors(columns, self.side) for columns in self.features_of_nothing()])

    def load(self) -> tuple[Predictor, FittedWorkflow]:
        """Return the model, opened once in each process."""
        return loaded_model(self.model, self.threads, None, self.maps, joined=self.joined)

    def _loaded(self) -> tuple[NetworkPredictor, PairFeatures]:
        predictor, fitted = self.load()
        return _network(predictor, self.model), self._features(fitted)

    def _features(self, fitted: FittedWorkflow) -> PairFeatures:
        return PairFeatures(self.user_columns, self.item_columns, self.context, fitted)


def _network(predictor: Any, model: Location) -> NetworkPredictor:
    if not isinstance(predictor, NetworkPredictor):
        raise UserError(f"the model in {model} has no vectors")
    return predictor


def _as_unknown(codes: NDArray[Any] | JaggedArray) -> NDArray[Any]:
    """Replace null's code 0 by 1, the code of values out of the vocabulary."""
    assert isinstance(codes, np.ndarray)
    return np.where(codes == 0, np.ones_like(codes), codes)


def map_vectors(
    spark: SparkSession,
    vectors: ModelVectors,
    frame: DataFrame,
    names: Sequence[str],
    parts: Callable[[], Partitioning],
    work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """Return `frame.mapInArrow(work, schema)`; joined tables' rows reach each part's task first.

    Args:
        spark: the session.
        vectors: the model, of which `work` asks the vectors of its rows.
        frame: users or items, with columns c0, c1, ...
        names: what these are called, to `work`.
        parts: says how the frame is cut; asked where rows are joined in. Else it is left as it is.
        work: what a task does.
        schema: of what that makes.
    """
    column_names = tuple(names)
    if vectors.joined:
        # This imports torch, which no other driver needs.
        from headrace.score.joined_rows import CodesOfVectors, map_with_table_rows

        needed = partial(CodesOfVectors, vectors)
        return map_with_table_rows(spark, vectors, needed, frame, column_names, parts(), work, schema)

    def named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(pa.RecordBatch.from_arrays(batch.columns, list(column_names)) for batch in batches)

    return frame.mapInArrow(named, schema)
