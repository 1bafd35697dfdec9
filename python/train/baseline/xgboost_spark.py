"""XGBoost on Spark over a dataset's Parquet row groups: the tasks on the executors, and their launch.

Task i of W reads row groups i, i+W, i+2W, ... of the split. Without a shuffle the rows have the same order each time,
which gives the same trees. For ranking, rows are shuffled by list, since lists must not be cut. Every executor must see
the dataset's folder, as for Petastorm.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xgboost as xgb
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession

from headrace.compute.jagged import FeatureColumns
from headrace.config import Trees
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.dataset.layout import open_split
from headrace.dataset.lists import by_column
from headrace.errors import UserError
from headrace.models.predictor import Predictor, load_predictor
from headrace.models.second_stage import SecondStagePredictor, stacked_matrix
from headrace.models.xgboost_model import XGBoostPredictor, matrix, matrix_columns, matrix_features
from headrace.storage import Location
from headrace.train.carried_columns import checked_weights
from headrace.train.evaluation.request import hash_ids


@dataclass(frozen=True)
class TreeInputs:
    """Columns of the matrix; small enough to send to tasks.

    Attributes:
        first: saved model whose predictions are columns too, visible on every executor; None: no such model.
        outputs: outputs of that model.
    """

    schema: DatasetSchema
    first: Location | None = None
    outputs: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Number of columns of the matrix."""
        return len(matrix_columns(self.schema)) + len(self.outputs)

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features that are read; the first model also reads raw ids."""
        if self.first is None:
            return matrix_features(self.schema)
        return (*self.schema.of(Kind.CONTINUOUS), *self.schema.of(Kind.CATEGORICAL))

    def matrix(self, columns: FeatureColumns) -> NDArray[np.float32]:
        """Return the matrix of features by name: float32 [n, width]."""
        if self.first is None:
            return matrix(self.schema, columns)
        return stacked_matrix(self.schema, columns, _loaded(self.first).predict_tasks(columns), self.outputs)

    def predictor(self, booster: xgb.Booster) -> Predictor:
        """Return the predictor of trees over such a matrix."""
        if self.first is None:
            return XGBoostPredictor(self.schema, booster)
        return SecondStagePredictor(self.schema, booster, _loaded(self.first), self.outputs)


@lru_cache(maxsize=1)
def _loaded(folder: Location) -> Predictor:
    """Return the model of a folder that never changes; each Python worker loads it once."""
    return load_predictor(folder, threads=1)


#: Rows of one Arrow batch between the tasks' processes and the JVM.
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class RowGroupSample:
    """A row group to read: all of it, or a sample."""

    path: Location
    #: Position of the row group in its file, and in the split.
    index: int
    piece: int
    rows: int
    take: int


@dataclass(frozen=True)
class Rows:
    """Some rows: their features by physical name, their labels float32 [n], other columns by name [n]."""

    features: Mapping[str, NDArray[Any]]
    labels: NDArray[np.float32]
    columns: Mapping[str, NDArray[Any]]


def sample_row_groups(
    dataset: Location, split: str, schema: DatasetSchema, max_rows: int | None = None, carried: Sequence[str] = ()
) -> list[RowGroupSample]:
    """Return the row groups of a split, in order; with `max_rows`, exactly that many rows spread evenly over them.

    Args:
        carried: carried columns that will be read.

    Raises:
        UserError: the split is missing or a file is damaged; see `headrace.dataset.layout.open_split`.
    """
    groups = open_split(dataset, split, schema, carried).row_groups
    total = sum(g.rows for g in groups)
    requested_rows = total if max_rows is None else min(total, max_rows)
    samples, passed_rows = [], 0
    for g in groups:
        # Differences of rounded-down cumulative shares: each is within one row of its share, and their sum is exact.
        take = (passed_rows + g.rows) * requested_rows // total - passed_rows * requested_rows // total
        passed_rows += g.rows
        if take:
            samples.append(RowGroupSample(g.path, g.index, g.piece, g.rows, take))
    return samples


def check_lists(groups: Sequence[RowGroupSample], label: str, lists: str, column: str, key: str) -> None:
    """Raise UserError if rows to train on have no list.

    Args:
        groups: row groups of a split.
        label: column of the label; rows without a label are left out in any case.
        lists: carried column of the lists, by its name in the dataset.
        column: the same column, by its name in the lake.
        key: key of the spec that names it, for the message.
    """
    missing = 0
    for group in groups:
        file = pq.ParquetFile(group.path.local_path())
        place = file.schema_arrow.names.index(lists)
        statistics = file.metadata.row_group(group.index).column(place).statistics
        if statistics is not None and statistics.has_null_count and not statistics.null_count:
            continue
        table = file.read_row_group(group.index, columns=[label, lists])
        missing += pc.sum(pc.and_(pc.is_null(table[lists]), pc.is_valid(table[label]))).as_py() or 0
    if missing:
        total = sum(group.rows for group in groups)
        raise UserError(
            f"column '{column}', by which {key} makes lists, is null in {missing:,} of {total:,} rows, which then "
            f"belong to no list: leave them out (features.prepare: dropna), or let ingest quarantine them "
            f"(`required: true`)"
        )


def read_rows(
    groups: Sequence[RowGroupSample],
    features: Sequence[Feature],
    label: str,
    further_columns: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[Rows]:
    """Yield the rows of row groups with a label, a batch at a time.

    Args:
        features: features to read.
        label: column of the label.
        further_columns: carried columns and codes to read as well.
        seed: seed of the samples.
    """
    columns = list(dict.fromkeys([*(f.name for f in features), label, *further_columns]))
    for group in groups:
        table = pq.ParquetFile(group.path.local_path()).read_row_group(group.index, columns=columns)
        if group.take < group.rows:
            rng = np.random.default_rng([seed, group.piece])
            table = table.take(np.sort(rng.choice(group.rows, group.take, replace=False)))
        if table[label].null_count:
            table = table.filter(pc.is_valid(table[label]))
        for start in range(0, table.num_rows, _BATCH_ROWS):
            part = table.slice(start, _BATCH_ROWS)
            yield Rows(
                by_column(part, features, str(group.path)),
                part[label].cast(pa.float32()).to_numpy(),
                {name: part[name].to_numpy() for name in further_columns},
            )


log = logging.getLogger("headrace.train")

_PROGRESS_SECONDS = 2.0
#: Names of further columns; those of the matrix are f0, f1, ..., since the spec may use any name.
_LABEL, _WEIGHT, _VALID, _LIST, _ROW = "label", "weight", "valid", "list", "row"
_ESTIMATORS = {"classification": "SparkXGBClassifier", "ranking": "SparkXGBRanker", "regression": "SparkXGBRegressor"}


@dataclass(frozen=True)
class TrainingRows:
    """Rows that trees learn from.

    Attributes:
        train: row groups of the training rows.
        valid: row groups of the validation rows; empty without early stopping.
        inputs: columns of the matrix.
        label: column of the label.
        group: carried column of the lists, for ranking; None: no lists.
        weight: carried column of the rows' weights; None: no weights.
    """

    train: Sequence[RowGroupSample]
    valid: Sequence[RowGroupSample]
    inputs: TreeInputs
    label: str
    group: str | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Fitted:
    """The trees up to the best one (columns: those of `TreeInputs`), and the metrics by tree."""

    booster: xgb.Booster
    metric: str
    training: list[float]
    validation: list[float]


def check_slots(spark: SparkSession, workers: int, name: str = "baseline") -> None:
    """Check on a local master that all tasks of a barrier stage fit at once.

    Raises:
        UserError: there are fewer cores than workers. (On a cluster Spark waits for executors that start late.)
    """
    sc = spark.sparkContext
    if not (sc.master or "").startswith("local"):
        return
    java = sc._jsc.sc()
    slots = int(java.maxNumConcurrentTasks(java.resourceProfileManager().resourceProfileFromId(0)))
    if slots < workers:
        raise UserError(
            f"{name}.workers is {workers}, but Spark's master {sc.master} runs {slots} task(s) at a time; "
            f"set {name}.workers={slots}, or a master with more cores (spark.master)"
        )


def feature_types(inputs: TreeInputs, conf: Trees) -> list[str]:
    """Return the type of each column of the matrix: `c`, codes that are split by sets, or `q`, a number."""
    types = []
    for f in matrix_features(inputs.schema):
        few = f.kind is Kind.CATEGORICAL and f.cardinality is not None and f.cardinality <= conf.max_categories
        types += ["c" if conf.enable_categorical and few else "q"] * f.length
    return types + ["q"] * len(inputs.outputs)


def eval_metric(conf: Trees, k: int) -> str:
    """Return XGBoost's name of the metric of early stopping; `k`: number of places for NDCG."""
    return {"classification": "logloss", "ranking": f"ndcg@{k}", "regression": "rmse"}[conf.objective]


def estimator_parameters(
    inputs: TreeInputs, conf: Trees, *, seed: int, k: int, device: str, workers: int, weighted: bool = False
) -> dict[str, Any]:
    """Return the arguments of the estimator of `xgboost.spark`, without callbacks."""
    parameters: dict[str, Any] = {
        "features_col": [f"f{i}" for i in range(inputs.width)],
        "label_col": _LABEL,
        "num_workers": workers,
        "n_estimators": conf.rounds,
        "max_depth": conf.max_depth,
        "learning_rate": conf.learning_rate,
        "tree_method": "hist",
        "missing": float("nan"),
        "random_state": seed,
        "eval_metric": eval_metric(conf, k),
        "verbose": False,
        **conf.booster_parameters(),
    }
    types = feature_types(inputs, conf)
    if "c" in types:
        parameters["feature_types"] = types
    if conf.objective == "ranking":
        parameters |= {"qid_col": _LIST, "objective": "rank:ndcg"}
    if weighted:
        parameters["weight_col"] = _WEIGHT
    if conf.stops_after is not None:
        parameters |= {"early_stopping_rounds": conf.stops_after, "validation_indicator_col": _VALID}
    if device != "cpu":
        parameters["device"] = device
    return parameters


def workers_for(rows: TrainingRows, conf: Trees) -> int:
    """Return the number of Spark tasks: each has at least one row group of each split that is read."""
    most = min(len(groups) for groups in (rows.train, rows.valid) if groups)
    return min(conf.workers, most)


def fit(
    spark: SparkSession,
    rows: TrainingRows,
    conf: Trees,
    *,
    seed: int,
    k: int = 10,
    device: str = "cpu",
    name: str = "baseline",
) -> Fitted:
    """Train trees on `conf.workers` Spark tasks.

    Args:
        spark: an active session with room for all workers at once.
        rows: rows of the splits, at least one of each.
        conf: the section `baseline` or `second_stage`.
        seed: seed of the row sample and of the trees' samples.
        k: number of places for NDCG, for ranking.
        device: `cpu` or `cuda`.
        name: name of the stage.
    """
    import xgboost.spark

    workers = workers_for(rows, conf)
    if workers < conf.workers:
        log.info("%s: %d worker(s), as a split has no more row groups (workers is %d)", name, workers, conf.workers)
    # Its INFO lines only repeat parameters.
    logging.getLogger("XGBoost-PySpark").setLevel(logging.WARNING)
    weighted = rows.weight is not None
    parameters = estimator_parameters(
        rows.inputs, conf, seed=seed, k=k, device=device, workers=workers, weighted=weighted
    )
    metric = parameters["eval_metric"]
    estimator = getattr(xgboost.spark, _ESTIMATORS[conf.objective])(
        **parameters, callbacks=[TrainingProgress(conf.rounds, metric, name)]
    )
    model = estimator.fit(_frame(spark, rows, workers, seed))
    booster, history = model.get_booster(), model.training_summary
    training = [float(v) for v in history.train_objective_history[metric]]
    validation = [float(v) for v in (history.validation_objective_history or {}).get(metric, [])]
    if validation:
        best = int(np.argmax(validation) if conf.objective == "ranking" else np.argmin(validation))
        booster = booster[: best + 1]
    return Fitted(booster, metric, training, validation)


def _frame(spark: SparkSession, rows: TrainingRows, workers: int, seed: int) -> DataFrame:
    """Return the matrix as a DataFrame of exactly `workers` partitions: f0, f1, ..., label, all float.

    With weights it has a column `weight`, 1 for validation rows. With validation rows it has a boolean `valid`. For
    ranking it has a number of each list, and all rows of a list are in one partition.
    """
    names = [f"f{i}" for i in range(rows.inputs.width)]
    further_columns = [c for c in (rows.group, rows.weight) if c is not None]

    def task_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, bool, Rows]]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                for valid, groups in ((False, rows.train), (True, rows.valid)):
                    groups_of_task = groups[task::workers]
                    for part in read_rows(groups_of_task, rows.inputs.features, rows.label, further_columns, seed):
                        yield task, valid, part

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows_before = 0
        for task, valid, part in task_rows(batches):
            data = rows.inputs.matrix(part.features)
            columns: dict[str, Any] = {name: np.ascontiguousarray(data[:, i]) for i, name in enumerate(names)}
            columns[_LABEL] = part.labels
            if rows.weight is not None:
                weights = np.ones(len(data), np.float32) if valid else part.columns[rows.weight]
                columns[_WEIGHT] = checked_weights(weights, rows.weight)
            if rows.valid:
                columns[_VALID] = np.full(len(part.labels), valid)
            if rows.group is not None:
                columns[_LIST] = hash_ids(part.columns[rows.group])
                columns[_ROW] = np.arange(rows_before, rows_before + len(data)) * workers + task
                rows_before += len(data)
            yield pa.record_batch([pa.array(c) for c in columns.values()], names=list(columns))

    numbers = [*names, _LABEL, *([] if rows.weight is None else [_WEIGHT])]
    ddl = ", ".join(f"{name} float" for name in numbers) + (f", {_VALID} boolean" if rows.valid else "")
    tasks = spark.range(0, workers, 1, workers)
    if rows.group is None:
        return tasks.mapInArrow(read, ddl)
    frame = tasks.mapInArrow(read, f"{ddl}, {_LIST} bigint, {_ROW} bigint")
    # Sort by the row's number too, since rows leave a shuffle in any order.
    frame = frame.repartition(workers, _LIST).sortWithinPartitions(_LIST, _ROW)
    return frame.mapInArrow(_number_lists, f"{ddl}, {_LIST} int, {_ROW} bigint").drop(_ROW)


def _number_lists(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Assign numbers 0, 1, ... to the lists of a partition: XGBoost's ids of lists have 32 bits."""
    last: int | None = None
    number = -1
    for batch in batches:
        if not batch.num_rows:
            continue
        place = batch.schema.get_field_index(_LIST)
        ids = batch.column(place).to_numpy()
        begins = np.diff(ids, prepend=ids[0]) != 0
        begins[0] = last is None or ids[0] != last
        numbers = (number + np.cumsum(begins)).astype(np.int32)
        last, number = int(ids[-1]), int(numbers[-1])
        columns = [pa.array(numbers) if i == place else c for i, c in enumerate(batch.columns)]
        yield pa.record_batch(columns, names=batch.schema.names)


class TrainingProgress(xgb.callback.TrainingCallback):  # type: ignore[misc]  # xgboost is untyped
    """Progress of the first worker, a line every few seconds on its standard error (locally the user's terminal)."""

    def __init__(self, rounds: int, metric: str, name: str) -> None:
        super().__init__()
        self._rounds, self._metric, self._name = rounds, metric, name
        self._started = self._last_line = 0.0

    def before_training(self, model: Any) -> Any:
        self._started = self._last_line = time.monotonic()
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, list[float]]]) -> bool:
        now, done = time.monotonic(), epoch + 1
        if xgb.collective.get_rank() == 0 and (now - self._last_line >= _PROGRESS_SECONDS or done == self._rounds):
            self._last_line = now
            seconds = max(now - self._started, 1e-9)
            metrics = ", ".join(
                f"{name} {self._metric} {history[self._metric][-1]:.4f}" for name, history in evals_log.items()
            )
            seconds_left = (self._rounds - done) * seconds / done
            line = f"round {done}/{self._rounds}, {metrics}, {done / seconds:.1f} rounds/s"
            print(f"{self._name}: {line}, {seconds_left:.0f} s left", file=sys.stderr, flush=True)
        return False
