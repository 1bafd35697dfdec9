"""Predictions of several models for the same raw rows, each by the workflow and vocabularies of its saved model.

A model can also be measured as a policy: it then chooses an action in the place of each logged one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.compute import pc
from headrace.compute.jagged import JaggedArray
from headrace.config.evaluation import OffPolicy
from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.features.functions.spark_expressions import col
from headrace.features.layout.split import SPLIT
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import Predictor, load_predictor, maps_of
from headrace.score.loaded_model import BLOCK_PAIRS, Columns, PairFeatures
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace, on_this_host
from headrace.train.evaluation.policy import Actions, Choices, Policy
from headrace.train.evaluation.ranks import Bools

_KEY = "train.evaluation.off_policy"
#: Most actions: each row is predicted once for each.
MOST_ACTIONS = 10_000
#: Predictions in memory at once: rows times actions.
_CELLS = 1 << 22
#: Probabilities nearer to 0 or 1 have no logit in float32.
_NEAREST = 1e-7


I64 = NDArray[np.int64]
#: Bins of predictions by their upper 16 bits: sign, exponent and seven bits of the mantissa, so below 1 % wide.
SCORE_BINS = 1 << 16


@dataclass(frozen=True)
class RawActions:
    """Actions to choose from, as columns of the events, so that each model computes its own features from them.

    rows: a row for each action; `column` has its value, other columns follow from it. Picklable.
    """

    settings: OffPolicy
    column: str
    rows: pa.Table

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that change with the action."""
        return tuple(self.rows.column_names)

    def choices(self, predict: Callable[[pa.RecordBatch], NDArray[np.float32]], rows: pa.RecordBatch) -> Choices:
        """Choose as the policy of a model in the place of rows: it predicts all of them once for each action.

        Args:
            predict: the model: probabilities float32 [n] of raw rows.
            rows: raw columns, those of `columns` among them.

        Raises:
            UserError: a prediction is no probability.
        """
        size = max(1, _CELLS // len(self.rows))
        return Choices.concat(
            [self._of_block(predict, rows.slice(start, size)) for start in range(0, rows.num_rows, size)]
        )

    def _of_block(self, predict: Callable[[pa.RecordBatch], NDArray[np.float32]], rows: pa.RecordBatch) -> Choices:
        values = self.rows[self.column].combine_chunks()
        logged = pc.index_in(rows.column(self.column).cast(values.type), values)
        places = pc.fill_null(logged, -1).to_numpy(zero_copy_only=False).astype(np.int64)

        def score(action: Mapping[str, Any]) -> NDArray[np.float64]:
            place = pa.array(np.full(rows.num_rows, action[self.column]))
            return logits_of(predict(self._with(rows, place)))

        return Policy(self.settings, Actions(self.column, np.arange(len(values)))).choose(places, score)

    def _with(self, rows: pa.RecordBatch, place: pa.Array) -> pa.RecordBatch:
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        for name in self.columns:
            columns[name] = self.rows[name].combine_chunks().take(place).cast(columns[name].type)
        return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def logits_of(probabilities: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return float64 [n] of float32 [n].

    Raises:
        UserError: one is no probability.
    """
    p = probabilities.astype(np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise UserError(f"{_KEY}: a model predicts numbers that are no probabilities, so it expects no reward")
    p = p.clip(_NEAREST, 1 - _NEAREST)
    logits: NDArray[np.float64] = np.log(p / (1 - p))
    return logits


def raw_actions(frame: DataFrame, schema: DatasetSchema, settings: OffPolicy) -> RawActions:
    """Return the actions that rows of the split `train` have.

    Args:
        frame: the rows that a day's dataset was made of, with their split.
        schema: the dataset's.
        settings: which feature the action is, and which follow from it.

    Raises:
        UserError: the action is made of several columns, a column does not follow from it, or there are too many.
    """
    (action,) = _features(schema, (settings.action,), "action")
    if len(action.sources) != 1:
        sources = ", ".join(action.sources)
        raise UserError(
            f"{_KEY}.action: '{action.name}' is made of several columns ({sources}), and rows get another action by one"
        )
    (column,) = action.sources
    follow = _features(schema, settings.action_features, "action_features")
    columns = list(dict.fromkeys([column, *(source for f in follow for source in f.sources)]))
    of_training = frame.where((F.col(SPLIT) == "train") & col(column).isNotNull())
    distinct = of_training.select(*[col(c) for c in columns]).distinct()
    actions = distinct.limit(MOST_ACTIONS + 1).toArrow().sort_by([(c, "ascending") for c in columns])
    values = actions[column]
    if len(pc.unique(values)) < len(actions):
        # The message names the first action that has several rows.
        counts = pc.value_counts(values).to_pylist()
        twice = next(count["values"] for count in counts if count["counts"] > 1)
        repeated_rows = actions.filter(pc.equal(values, twice))
        differs = next(c for c in columns if len(pc.unique(repeated_rows[c])) > 1)
        raise UserError(
            f"{_KEY}.action_features: '{differs}' differs among rows with the same '{column}', so it does not follow "
            f"from the action; leave its feature out"
        )
    if len(actions) > MOST_ACTIONS:
        raise UserError(
            f"{_KEY}: '{column}' has more than {MOST_ACTIONS:,} values in the split 'train', and each row is "
            f"predicted once for each; off-policy estimates are for fewer actions"
        )
    if not len(actions):
        raise UserError(f"{_KEY}: no row of the split 'train' has a '{column}'")
    return RawActions(settings, column, actions)


def _features(schema: DatasetSchema, names: tuple[str, ...], key: str) -> list[Feature]:
    by_name = {f.name: f for f in schema.features}
    if unknown := [name for name in names if name not in by_name]:
        raise UserError(f"{_KEY}.{key}: the dataset has no feature '{unknown[0]}'")
    return [by_name[name] for name in names]


@dataclass(frozen=True)
class OpenModel:
    """A saved model with its own workflow, in this process."""

    predictor: Predictor
    fitted: FittedWorkflow

    @staticmethod
    def load(folder: Location, maps: HostPlace, threads: int = 1) -> OpenModel:
        """Open it.

        Args:
            folder: the saved model.
            maps: where the host's processes map models.
            threads: of the model's library.

        Raises:
            UserError: it is incomplete or damaged.
        """
        model_maps = maps_of(folder, on_this_host(maps))
        predictor = load_predictor(folder, threads, maps=model_maps)
        return OpenModel(predictor, FittedWorkflow.load(folder / "workflow", maps=model_maps / "vocabularies"))

    def features(self, rows: pa.RecordBatch) -> Columns:
        """Return the model's features of raw rows."""
        return PairFeatures(tuple(rows.schema.names), (), {}, self.fitted).row_columns(rows)

    def predict_rows(self, rows: pa.RecordBatch) -> NDArray[np.float32]:
        """`predict` of raw rows."""
        return self.predict(self.features(rows))

    def predict(self, columns: Columns) -> NDArray[np.float32]:
        """Return float32 [rows]; what is not finite is given as it is."""
        return self.predictor.predict(columns)


@dataclass
class KnownValues:
    """Counts of each categorical feature's values, and of those that a model's vocabulary has."""

    names: tuple[str, ...]
    counts: I64 = field(init=False)

    def __post_init__(self) -> None:
        #: int64 [features, 2]: number of values, and of known ones.
        self.counts = np.zeros((len(self.names), 2), np.int64)

    @staticmethod
    def for_workflow(fitted: FittedWorkflow) -> KnownValues:
        """Return zero counts for the features that have a vocabulary."""
        categorical = fitted.schema.of(Kind.CATEGORICAL)
        return KnownValues(tuple(f.name for f in categorical if f.vocabulary is not None))

    def add(self, fitted: FittedWorkflow, columns: Columns) -> None:
        """Count the values of some rows."""
        first = {f.name: f.first_code for f in fitted.schema.of(Kind.CATEGORICAL)}
        for i, name in enumerate(self.names):
            column = columns[name]
            codes = column.values if isinstance(column, JaggedArray) else column
            self.counts[i] += (int((codes != NULL_CODE).sum()), int((codes >= first[name]).sum()))


def check_columns(folder: Location, columns: Sequence[str]) -> None:
    """Check that rows have the columns that a saved model's features read; reads its workflow's settings alone.

    Raises:
        UserError: they lack some, or the folder is no whole saved model.
    """
    fitted = FittedWorkflow.load(folder / "workflow", most_values=0)
    missing = [c for c in fitted.input_columns if c not in columns]
    if missing:
        raise UserError(f"its features read {', '.join(repr(c) for c in missing)}, which the rows do not have any more")


def inputs_of(folder: Location) -> tuple[str, ...]:
    """Return the columns that the features of a saved model read."""
    return FittedWorkflow.load(folder / "workflow", most_values=0).input_columns


def score_counts(scores: NDArray[np.float32]) -> I64:
    """Return how many finite predictions are in each of SCORE_BINS bins, in the order of the predictions: int64."""
    bits = (scores[np.isfinite(scores)] + np.float32(0)).view(np.int32).astype(np.int64)
    order = np.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)
    return np.bincount(order >> 16, minlength=SCORE_BINS).astype(np.int64)


def coarse_counts(expected: I64, actual: I64, parts: int = 10) -> tuple[list[int], list[int]]:
    """Return two fine histograms in few bins, of which each has about as many of `expected`.

    Args:
        expected: counts by fine bin, as `score_counts` gives them.
        actual: in the same bins.
        parts: bins at most.

    Returns:
        Counts by coarse bin of both; bins that neither has anything in are left out.
    """
    total = int(expected.sum())
    counts_below = np.cumsum(expected) - expected
    coarse_bin = np.minimum(counts_below * parts // max(total, 1), parts - 1)
    pairs = [
        (int(expected[coarse_bin == part].sum()), int(actual[coarse_bin == part].sum()))
        for part in range(parts)
        if (coarse_bin == part).any()
    ]
    non_empty = [p for p in pairs if any(p)]
    return [e for e, _ in non_empty], [a for _, a in non_empty]


@dataclass
class CollectedRows:
    """Rows of a task: labels, carried columns, codes, and each model's predictions."""

    models: Sequence[OpenModel]
    codes: Sequence[str]
    carried: Sequence[str]
    #: Actions that each model as a policy chooses among; None: no policy is measured.
    actions: RawActions | None = None
    _scores: list[list[NDArray[np.float32]]] = field(init=False)
    _labels: list[NDArray[np.float32]] = field(default_factory=list)
    _carried: dict[str, list[pa.Array]] = field(init=False)
    _codes: dict[str, list[NDArray[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self._scores = [[] for _ in self.models]
        self._carried = {name: [] for name in self.carried}
        self._codes = {name: [] for name in self.codes}
        self._choices: list[list[Choices]] = [[] for _ in self.models]
        self.known = [KnownValues.for_workflow(m.fitted) for m in self.models]

    def add(self, rows: pa.RecordBatch, label: pa.Array, carried: Mapping[str, pa.Array]) -> None:
        """Predict raw rows, in blocks of bounded size.

        Args:
            rows: raw columns.
            label: float32.
            carried: by name in the dataset.
        """
        for start in range(0, rows.num_rows, BLOCK_PAIRS):
            part = rows.slice(start, BLOCK_PAIRS)
            for i, model in enumerate(self.models):
                columns = model.features(part)
                self._scores[i].append(model.predict(columns))
                self.known[i].add(model.fitted, columns)
                if self.actions is not None:
                    self._choices[i].append(self.actions.choices(model.predict_rows, part))
                if i == 0:  # codes of the dataset belong to the day's own model
                    for name in self.codes:
                        codes = columns[name]
                        assert not isinstance(codes, JaggedArray)
                        self._codes[name].append(codes.astype(np.int64))
        self._labels.append(label.to_numpy(zero_copy_only=False).astype(np.float32))
        for name, column in carried.items():
            self._carried[name].append(column)

    def scores(self, model: int) -> NDArray[np.float32]:
        """Return float32 [rows] of one of the models."""
        return _joined(self._scores[model], np.float32)

    def choices(self, model: int, selected: Bools) -> Choices | None:
        """Return the choices of one model in the place of selected rows (bool [rows]); None: no policy is measured."""
        if self.actions is None:
            return None
        choices = Choices.concat(self._choices[model])
        return Choices(choices.chosen[selected], choices.expected[selected])

    @property
    def labels(self) -> NDArray[np.float32]:
        """Return float32 [rows], NaN where there is none."""
        return _joined(self._labels, np.float32)

    def carried_column(self, name: str) -> NDArray[Any]:
        """Return a carried column, [rows]."""
        parts = self._carried[name]
        return pa.chunked_array(parts).to_numpy() if parts else np.empty(0, object)

    def code_column(self, name: str) -> I64:
        """Return a feature's codes, [rows]."""
        return _joined(self._codes[name], np.int64)


def _joined(parts: Sequence[NDArray[Any]], empty: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, empty)
