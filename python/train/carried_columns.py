"""Carried columns as labels of tasks, lists and weights of training rows, and expressions over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from headrace import config
from headrace.config import Spec, Task, Train, Trees
from headrace.config.schema import DatasetSchema
from headrace.errors import UserError
from headrace.features.layout.files import day_number, split_ranges
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from headrace.features.table_ops.row_expression import RowExpression

_ELEMENTS: dict[str, Any] = {
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "bool": "boolean",
}
_ARROW = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}


def parse_carried(text: str, schema: DatasetSchema, result: str) -> RowExpression | None:
    """Parse an expression over carried columns with values of type `result` (`string`, `boolean`).

    Returns None if the text is not such an expression.
    """
    from headrace.features.table_ops.row_expression import parse

    return parse(text, carried_types(schema), ValueType(result))  # type: ignore[arg-type]


def parse_condition(text: str, schema: DatasetSchema, key: str) -> RowExpression:
    """Parse a condition over carried columns.

    Args:
        key: key of the spec with the condition, for the message.

    Raises:
        UserError: a column is not carried, or the text is not a supported condition.
    """
    condition = parse_carried(text, schema, "boolean")
    if condition is None:
        known = ", ".join(carried_types(schema)) or "there are none"
        raise UserError(
            f"{key}: '{text}' is no condition over the carried columns ({known}); "
            f"write one over columns of features.carried such as `age < 30` (headrace reference: lambda)"
        )
    return condition


def carried_types(schema: DatasetSchema) -> dict[str, ValueType]:
    """Return the columns that an expression may use, by their names in the lake's table."""
    carried = schema.carried_columns.items()
    return {name: ValueType(_ELEMENTS[f.dtype]) for name, f in carried if f.dtype in _ELEMENTS}


def columns_of(expressions: Collection[RowExpression]) -> tuple[str, ...]:
    """Return the columns of the lake's table that expressions use."""
    return tuple(dict.fromkeys(c for e in expressions for c in e.columns))


def evaluate_expression(
    expression: RowExpression, carried: Mapping[str, npt.NDArray[Any]], schema: DatasetSchema, key: str
) -> pa.Array | pa.ChunkedArray:
    """Return an expression's value of each row, [n].

    Args:
        carried: the columns by their names in the dataset, [n].
        key: key of the spec with the expression, for the message.

    Raises:
        UserError: the evaluation has an overflow or a division by zero.
    """
    features = schema.carried_columns

    def column(name: str) -> pa.Array:
        # NumPy stores integers with nulls as floats, whose NaN means null here.
        return pa.array(carried[features[name].name], from_pandas=True).cast(_ARROW[features[name].dtype])

    try:
        values = expression.arrow(column)
    except pa.ArrowInvalid as e:
        raise UserError(f"{key}: {e}") from None
    if isinstance(values, pa.Scalar):
        return pa.array([values.as_py()] * len(next(iter(carried.values()))), values.type)
    return values


F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
_DAY_MICROS = 86_400 * 1_000_000


class TaskLabels:
    """The label of each row for each task.

    Args:
        train: settings with `tasks`.
        schema: schema of the dataset.
        ds: day of the run; labels are known as of its end (UTC).

    Raises:
        UserError: a label is text, is not carried, or is also a feature; or a condition or a time is not valid.
    """

    def __init__(self, train: Train, schema: DatasetSchema, ds: str) -> None:
        self._tasks, self._schema = train.tasks, schema
        self._first = next(iter(train.tasks), None)
        self._labels = {
            name: _label_column(name, task, schema) for name, task in train.tasks.items() if task.label is not None
        }
        self._conditions = {
            name: parse_condition(task.where, schema, f"train.tasks.{name}.where")
            for name, task in train.tasks.items()
            if task.where is not None and task.where not in train.tasks
        }
        end = (date.fromisoformat(ds) + timedelta(days=1) - date(1970, 1, 1)).days * _DAY_MICROS
        #: For each task, the column of its rows' times, and the latest time with a known label.
        self._known_until: dict[str, tuple[str, int]] = {
            name: (_time_column(name, task, schema), end - round(task.known_after.days * _DAY_MICROS))
            for name, task in train.tasks.items()
            if task.known_after is not None
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks except the first, whose labels are those of the dataset."""
        return tuple(name for name in self._tasks if name != self._first)

    @property
    def carried(self) -> tuple[str, ...]:
        """Carried columns from which labels are computed, by their names in the dataset; empty without tasks."""
        conditions = [self._schema.carried_name(c) for c in columns_of(self._conditions.values())]
        times = [column for column, _ in self._known_until.values()]
        return tuple(dict.fromkeys([*self._labels.values(), *conditions, *times]))

    def with_label_columns(self, columns: Iterable[str]) -> list[str]:
        """Return the distinct names of `columns` and of the columns of labels."""
        return list(dict.fromkeys([*columns, *self.carried]))

    def targets(self, labels: F32, carried: Mapping[str, npt.NDArray[Any]]) -> dict[str, F32]:
        """Return the labels of rows for each task but the first: float32 [B], NaN for a row outside the task.

        Args:
            labels: labels of the first task, float32 [B].
            carried: the columns `carried`, [B].

        Raises:
            UserError: a label is not valid.
        """
        if not len(labels):  # carried columns have no type
            return {name: np.empty(0, np.float32) for name in self.names}
        targets: dict[str, F32] = {} if self._first is None else {self._first: labels}
        # Rows that a task could have by its own conditions, regardless of earlier tasks.
        spaces = {name: self._space(name, len(labels), carried) for name in self._tasks}
        for name, task in self._tasks.items():
            if name == self._first:
                continue
            if task.product:
                target = _product([targets[factor] for factor in task.product])
                space = np.logical_and.reduce([spaces[name], *(spaces[factor] for factor in task.product)])
            else:
                target, space = self._checked(name, task, carried[self._labels[name]]), spaces[name]
            if task.where in self._tasks:
                space = space & (targets[str(task.where)] == 1)
            targets[name] = np.where(space, target, np.float32(np.nan))
        return {name: targets[name] for name in self.names}

    def _space(self, name: str, rows: int, carried: Mapping[str, npt.NDArray[Any]]) -> Bools:
        space = np.ones(rows, bool)
        if name in self._conditions:
            space &= _is_true(self._conditions[name], carried, self._schema, f"train.tasks.{name}.where")
        if name in self._known_until:
            column, until = self._known_until[name]
            # Null is NaN where the column has nulls, and no such row is old enough.
            space &= carried[column] <= until
        return space

    def _checked(self, name: str, task: Task, values: npt.NDArray[Any]) -> F32:
        numbers = np.asarray([np.nan if v is None else v for v in values] if values.dtype == object else values)
        target = numbers.astype(np.float32)
        bad = np.isinf(target)
        if task.is_probability:
            bad |= (target < 0) | (target > 1)
        if bad.any():
            allowed = "in [0, 1], or null" if task.is_probability else "finite, or null"
            raise UserError(
                f"train.tasks.{name}: the label '{task.label}' is {target[bad][0]} in {int(bad.sum())} of "
                f"{len(target)} rows of a batch; labels with loss: {task.loss.kind} are {allowed}"
            )
        return target


def _product(targets: list[F32]) -> F32:
    """Return the product of labels: 0 if one is 0, else NaN if one is unknown."""
    stacked = np.stack(targets)
    known: F32 = np.where((stacked == 0).any(0), np.float32(0), stacked.prod(0))
    return known


def _is_true(
    condition: RowExpression, carried: Mapping[str, npt.NDArray[Any]], schema: DatasetSchema, key: str
) -> Bools:
    values = evaluate_expression(condition, carried, schema, key)
    mask: Bools = values.fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    return mask


def _label_column(name: str, task: Task, schema: DatasetSchema) -> str:
    assert task.label is not None
    prefix = f"train.tasks.{name}.label: the column '{task.label}'"
    feature = schema.carried_columns.get(task.label)
    if feature is None:
        raise UserError(f"{prefix} is not carried by the dataset; name it in features.carried")
    if feature.dtype == "string":
        raise UserError(f"{prefix} is text; labels are numbers or booleans")
    leaks = [f.name for f in schema.features if task.label in f.sources]
    if leaks:
        raise UserError(f"{prefix} is what the feature '{leaks[0]}' is made of, which would leak the label")
    return feature.name


def _time_column(name: str, task: Task, schema: DatasetSchema) -> str:
    assert task.known_after is not None
    column = task.known_after.event_time
    feature = schema.carried_columns.get(column)
    if feature is None or not feature.is_timestamp:
        raise UserError(
            f"train.tasks.{name}.known_after.event_time: '{column}' is no carried column of timestamps; name such a "
            f"one in features.carried"
        )
    return feature.name


class ListColumn:
    """A carried column whose values are lists' names; see config.Loss.group.

    Args:
        column: name of the column in the dataset.
        rows_each: rows of a stream in a step. Lists end there, so that they are the same on any number of ranks.
    """

    def __init__(self, column: str, rows_each: int) -> None:
        self.column, self._rows_each = column, rows_each

    @staticmethod
    def from_spec(model: config.Model, train: config.Train, schema: DatasetSchema) -> ListColumn | None:
        """Return the column that `model.loss.group` names, or None.

        Raises:
            UserError: the dataset does not carry the column.
        """
        group = None if model.loss is None else model.loss.group
        if group is None:
            return None
        if group not in schema.carried_columns:
            known = ", ".join(schema.carried_columns) or "none"
            raise UserError(
                f"model.loss.group: the dataset does not carry '{group}' (there are: {known}); name it in "
                f"features.carried"
            )
        return ListColumn(schema.carried_name(group), train.batch_size // train.streams)

    def list_ids(self, carried: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """Return the number of each row's list: int64 [B]; null is a value like any other."""
        values = carried[self.column]
        if values.dtype == object:
            values = np.array(["" if v is None else f"_{v}" for v in values])
        _, codes = np.unique(values, return_inverse=True)
        first = np.arange(len(values), dtype=np.int64) // self._rows_each * len(values)
        ids: npt.NDArray[np.int64] = first + codes
        return ids


class DayDecay(BaseModel):
    """Weights of training rows by their day (`retrain.half_life_days`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Column of the events table with the event's time.
    column: str
    half_life_days: float
    #: The last training day, in UTC.
    last_day: str
    #: Number of days of the training range.
    days: int
    #: Whether rows before the range are replayed. They have the weight 1, since `retrain.replay` sets their share.
    replayed: bool = False

    @staticmethod
    def from_spec(spec: Spec, ds: str) -> DayDecay | None:
        """Return the decay that a spec sets for the training of `ds`, or None: all rows count alike."""
        if spec.retrain is None or spec.retrain.half_life_days is None:
            return None
        assert spec.table.event_time is not None  # config.Spec has checked it
        return DayDecay(
            column=spec.table.event_time,
            half_life_days=spec.retrain.half_life_days,
            last_day=split_ranges(spec, ds)[0][1],
            days=spec.features.window_days,
            replayed=spec.retrain.replay is not None,
        )

    def carried_name(self, schema: DatasetSchema) -> str:
        """Return the dataset's name of the column.

        Raises:
            UserError: the column is not a carried timestamp.
        """
        feature = schema.carried_columns.get(self.column)
        if feature is None or not feature.is_timestamp:
            raise UserError(
                f"retrain.half_life_days: the event_time '{self.column}' is no carried column of timestamps; name it "
                f"in features.carried"
            )
        return feature.name

    def weights(self, times: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the weights of rows by their events' times, int64 microseconds since 1970 [B] -> float32 [B].

        The mean is 1 for rows that are spread evenly over the days. Rows before the range have the weight of its first
        day, or 1 if they are replayed.
        """
        days = day_number(self.last_day) - times // _DAY_MICROS
        age = np.clip(days, 0, self.days - 1)
        mean = np.mean(0.5 ** (np.arange(self.days) / self.half_life_days))
        weights: npt.NDArray[np.float32] = (0.5 ** (age / self.half_life_days) / mean).astype(np.float32)
        if self.replayed:
            weights[days >= self.days] = 1.0
        return weights


def decay_of(carried: Mapping[str, npt.NDArray[Any]], decay: DayDecay, column: str) -> npt.NDArray[np.float32]:
    """Return the weights of a batch's rows by its carried columns.

    Raises:
        UserError: a row has no time.
    """
    times = carried[column]
    if times.dtype.kind != "i":
        raise UserError(f"retrain.half_life_days: rows of a batch have no {decay.column}: declare it required")
    return decay.weights(times)


class SampleWeights:
    """Weights of the rows' losses.

    Args:
        train: settings, perhaps with `sample_weight`.
        schema: schema of the dataset.
        decay: decay by days; None: all days have the same weight.

    Raises:
        UserError: a column has another type, or is not carried.
    """

    def __init__(self, train: Train, schema: DatasetSchema, decay: DayDecay | None = None) -> None:
        self._column = next(iter(carried_weight(train, schema)), None)
        self._decay, self._time = decay, None if decay is None else decay.carried_name(schema)

    @property
    def carried(self) -> tuple[str, ...]:
        """Carried columns from which weights are computed, by their names in the dataset; empty: no weights."""
        return tuple(dict.fromkeys(c for c in (self._column, self._time) if c is not None))

    def weights(self, carried: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32] | None:
        """Return the weights of a batch: float32 [B]; None: all rows have the same weight.

        Args:
            carried: the columns `carried`, [B].

        Raises:
            UserError: a weight is not a number of at least 0, or a row has no time.
        """
        weights = None if self._column is None else checked_weights(carried[self._column], self._column)
        if self._decay is None or self._time is None:
            return weights
        of_day = decay_of(carried, self._decay, self._time)
        return of_day if weights is None else weights * of_day


def carried_weight(train: Train, schema: DatasetSchema) -> tuple[str, ...]:
    """Return the carried column of the weights, by its name in the dataset; empty without one.

    Raises:
        UserError: the column is text.
    """
    if train.sample_weight is None:
        return ()
    feature = schema.carried_columns.get(train.sample_weight)
    if feature is not None and feature.dtype == "string":
        raise UserError(f"train.sample_weight: the column '{train.sample_weight}' is text; weights are numbers")
    return (schema.carried_name(train.sample_weight),)


def checked_weights(values: npt.NDArray[Any], column: str) -> npt.NDArray[np.float32]:
    """Return a batch's weights: [B] -> float32 [B].

    Raises:
        UserError: a weight is null, not finite or below 0.
    """
    weights = values.astype(np.float32)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        raise UserError(
            f"train.sample_weight: '{column}' is {weights[bad][0]} in {int(bad.sum())} of {len(weights)} rows of a "
            f"batch; weights are numbers of at least 0: let ingest quarantine such rows (required: true, "
            f"table.expectations.ranges)"
        )
    return weights


def is_weighted(spec: Spec, conf: Trees | None) -> bool:
    """Return True if rows have weights. For ranking they have none: XGBoost has weights of lists, not of rows."""
    is_ranking = conf is not None and conf.objective == "ranking"
    return spec.train.sample_weight is not None and not is_ranking
