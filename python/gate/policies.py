"""Saved models as policies over raw rows: what each would choose in the place of what was logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config.evaluation import OffPolicy
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.split import SPLIT
from headrace.schema import DatasetSchema, Feature
from headrace.train.evaluation.policy import Actions, Choices, Policy

_WHERE = "train.evaluation.off_policy"
#: Each row is predicted once for each of them.
MOST_ACTIONS = 10_000
#: Rows by actions that are held at once.
_CELLS = 1 << 22
#: Nearer to 0 and 1 float32 knows no logits.
_NEAREST = 1e-7


@dataclass(frozen=True)
class RawActions:
    """What there is to choose from, as columns of the events, so that each model makes its own features of them.

    rows: a row for each action; `column` has its value, other columns follow from it. Picklable.
    """

    settings: OffPolicy
    column: str
    rows: pa.Table

    @property
    def columns(self) -> tuple[str, ...]:
        """What changes with the action."""
        return tuple(self.rows.column_names)

    def choices(self, predict: Callable[[pa.RecordBatch], NDArray[np.float32]], rows: pa.RecordBatch) -> Choices:
        """What a model as a policy does in the place of rows: it predicts all of them once for each action.

        Args:
            predict: the model: probabilities float32 [n] of raw rows.
            rows: raw columns, those of `columns` among them.

        Raises:
            UserError: a prediction is no probability.
        """
        size = max(1, _CELLS // len(self.rows))
        return Choices.concat([self._of_block(predict, rows.slice(at, size)) for at in range(0, rows.num_rows, size)])

    def _of_block(self, predict: Callable[[pa.RecordBatch], NDArray[np.float32]], rows: pa.RecordBatch) -> Choices:
        values = self.rows[self.column].combine_chunks()
        logged = pc.index_in(rows.column(self.column).cast(values.type), values)
        places = pc.fill_null(logged, -1).to_numpy(zero_copy_only=False).astype(np.int64)

        def score(action: Mapping[str, Any]) -> NDArray[np.float64]:
            place = pa.array(np.full(rows.num_rows, action[self.column]))
            return logits_of(predict(self._with(rows, place)))

        return Policy(self.settings, Actions(self.column, np.arange(len(values)))).choose(places, score)

    def _with(self, rows: pa.RecordBatch, place: pa.Array) -> pa.RecordBatch:
        found = dict(zip(rows.schema.names, rows.columns, strict=True))
        for name in self.columns:
            found[name] = self.rows[name].combine_chunks().take(place).cast(found[name].type)
        return pa.RecordBatch.from_arrays(list(found.values()), list(found))


def logits_of(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    """float64 [n] of float32 [n].

    Raises:
        UserError: one is no probability.
    """
    p = probabilities.astype(np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise UserError(f"{_WHERE}: a model predicts numbers that are no probabilities, so it expects no reward")
    p = p.clip(_NEAREST, 1 - _NEAREST)
    found: NDArray[np.float64] = np.log(p / (1 - p))
    return found


def raw_actions(frame: DataFrame, schema: DatasetSchema, settings: OffPolicy) -> RawActions:
    """The actions that rows of the split `train` have.

    Args:
        frame: the rows that a day's dataset was made of, with their split.
        schema: the dataset's.
        settings: which feature the action is, and which follow from it.

    Raises:
        UserError: the action is made of several columns, a column does not follow from it, or there are too many.
    """
    (action,) = _features(schema, (settings.action,), "action")
    if len(action.sources) != 1:
        made = ", ".join(action.sources)
        raise UserError(
            f"{_WHERE}.action: '{action.name}' is made of several columns ({made}), and rows get another action by one"
        )
    (column,) = action.sources
    follow = _features(schema, settings.action_features, "action_features")
    columns = list(dict.fromkeys([column, *(source for f in follow for source in f.sources)]))
    of_training = frame.where((F.col(SPLIT) == "train") & col(column).isNotNull())
    distinct = of_training.select(*[col(c) for c in columns]).distinct()
    found = distinct.limit(MOST_ACTIONS + 1).toArrow().sort_by([(c, "ascending") for c in columns])
    values = found[column]
    if len(pc.unique(values)) < len(found):
        # Which one is told by the first action that has several rows.
        counts = pc.value_counts(values).to_pylist()
        twice = next(of["values"] for of in counts if of["counts"] > 1)
        of_it = found.filter(pc.equal(values, twice))
        differs = next(c for c in columns if len(pc.unique(of_it[c])) > 1)
        raise UserError(
            f"{_WHERE}.action_features: '{differs}' differs among rows with the same '{column}', so it does not follow "
            f"from the action; leave its feature out"
        )
    if len(found) > MOST_ACTIONS:
        raise UserError(
            f"{_WHERE}: '{column}' has more than {MOST_ACTIONS:,} values in the split 'train', and each row is "
            f"predicted once for each; off-policy estimates are for fewer actions"
        )
    if not len(found):
        raise UserError(f"{_WHERE}: no row of the split 'train' has a '{column}'")
    return RawActions(settings, column, found)


def _features(schema: DatasetSchema, names: tuple[str, ...], key: str) -> list[Feature]:
    by_name = {f.name: f for f in schema.features}
    if unknown := [name for name in names if name not in by_name]:
        raise UserError(f"{_WHERE}.{key}: the dataset has no feature '{unknown[0]}'")
    return [by_name[name] for name in names]
