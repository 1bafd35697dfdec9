"""What several models say of the same raw rows: each by the workflow and the vocabularies that it was saved with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.gate.policies import RawActions
from headrace.jagged import JaggedArray
from headrace.models.predictor import Predictor, load_predictor, maps_of
from headrace.schema import NULL_CODE, Kind
from headrace.score.rank.pair_features import BLOCK_PAIRS, Columns, PairFeatures
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace, on_this_host
from headrace.train.evaluation.policy import Choices
from headrace.train.evaluation.rows import Bools

I64 = NDArray[np.int64]
#: Bins of predictions by their bits: sign, exponent and seven digits of the mantissa, so less than 1 % wide.
SCORE_BINS = 1 << 16


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
        mine = maps_of(folder, on_this_host(maps))
        predictor = load_predictor(folder, threads, maps=mine)
        return OpenModel(predictor, FittedWorkflow.load(folder / "workflow", maps=mine / "vocabularies"))

    def features(self, rows: pa.RecordBatch) -> Columns:
        """The model's features of raw rows."""
        return PairFeatures(tuple(rows.schema.names), (), {}, self.fitted).row_columns(rows)

    def predict_rows(self, rows: pa.RecordBatch) -> NDArray[np.float32]:
        """`predict` of raw rows."""
        return self.predict(self.features(rows))

    def predict(self, columns: Columns) -> NDArray[np.float32]:
        """float32 [rows]; what is not finite is given as it is."""
        return self.predictor.predict(columns)


@dataclass
class KnownValues:
    """How many values of each categorical feature a model's vocabulary has, of how many there are."""

    names: tuple[str, ...]
    counts: I64 = field(init=False)

    def __post_init__(self) -> None:
        #: int64 [features, 2]: values; those that are known.
        self.counts = np.zeros((len(self.names), 2), np.int64)

    @staticmethod
    def of(fitted: FittedWorkflow) -> KnownValues:
        """Of the features that have a vocabulary; nothing counted yet."""
        found = fitted.schema.of(Kind.CATEGORICAL)
        return KnownValues(tuple(f.name for f in found if f.vocabulary is not None))

    def add(self, fitted: FittedWorkflow, columns: Columns) -> None:
        """Count the values of some rows."""
        first = {f.name: f.first_code for f in fitted.schema.of(Kind.CATEGORICAL)}
        for i, name in enumerate(self.names):
            found = columns[name]
            codes = found.values if isinstance(found, JaggedArray) else found
            self.counts[i] += (int((codes != NULL_CODE).sum()), int((codes >= first[name]).sum()))


def check_columns(folder: Location, there: Sequence[str]) -> None:
    """See that rows have what a saved model's features read; reads its workflow's settings alone.

    Raises:
        UserError: they lack some, or the folder is no whole saved model.
    """
    fitted = FittedWorkflow.load(folder / "workflow", most_values=0)
    missing = [c for c in fitted.input_columns if c not in there]
    if missing:
        raise UserError(f"its features read {', '.join(repr(c) for c in missing)}, which the rows do not have any more")


def inputs_of(folder: Location) -> tuple[str, ...]:
    """The columns that the features of a saved model read."""
    return FittedWorkflow.load(folder / "workflow", most_values=0).input_columns


def score_counts(scores: NDArray[np.float32]) -> I64:
    """How many finite predictions are in each of SCORE_BINS bins, in the order of the predictions: int64."""
    bits = (scores[np.isfinite(scores)] + np.float32(0)).view(np.int32).astype(np.int64)
    order = np.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)
    return np.bincount(order >> 16, minlength=SCORE_BINS).astype(np.int64)


def coarse_counts(expected: I64, actual: I64, parts: int = 10) -> tuple[list[int], list[int]]:
    """Two fine histograms in few bins, of which each has about as many of `expected`.

    Args:
        expected: counts by fine bin, as `score_counts` gives them.
        actual: in the same bins.
        parts: bins at most.

    Returns:
        Counts by coarse bin of both; bins that neither has anything in are left out.
    """
    total = int(expected.sum())
    before = np.cumsum(expected) - expected
    of = np.minimum(before * parts // max(total, 1), parts - 1)
    pairs = [
        (int(expected[of == part].sum()), int(actual[of == part].sum())) for part in range(parts) if (of == part).any()
    ]
    kept = [p for p in pairs if any(p)]
    return [e for e, _ in kept], [a for _, a in kept]


@dataclass
class CollectedRows:
    """What a task keeps of its rows: of the split's name, label and user, and of each model's predictions."""

    models: Sequence[OpenModel]
    codes: Sequence[str]
    carried: Sequence[str]
    #: What each model as a policy chooses among; None: nobody asks.
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
        self.known = [KnownValues.of(m.fitted) for m in self.models]

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
                if i == 0:  # the codes of the dataset are the day's own model's
                    for name in self.codes:
                        found = columns[name]
                        assert not isinstance(found, JaggedArray)
                        self._codes[name].append(found.astype(np.int64))
        self._labels.append(label.to_numpy(zero_copy_only=False).astype(np.float32))
        for name, column in carried.items():
            self._carried[name].append(column)

    def scores(self, model: int) -> NDArray[np.float32]:
        """float32 [rows] of one of the models."""
        return _joined(self._scores[model], np.float32)

    def choices(self, model: int, kept: Bools) -> Choices | None:
        """What one of the models would choose in the place of some of the rows (bool [rows]); None: nobody asks."""
        if self.actions is None:
            return None
        found = Choices.concat(self._choices[model])
        return Choices(found.chosen[kept], found.expected[kept])

    @property
    def labels(self) -> NDArray[np.float32]:
        """float32 [rows], NaN where there is none."""
        return _joined(self._labels, np.float32)

    def carried_column(self, name: str) -> NDArray[Any]:
        """A carried column, [rows]."""
        parts = self._carried[name]
        return pa.chunked_array(parts).to_numpy() if parts else np.empty(0, object)

    def code_column(self, name: str) -> I64:
        """A feature's codes, [rows]."""
        return _joined(self._codes[name], np.int64)


def _joined(parts: Sequence[NDArray[Any]], empty: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, empty)
