"""The labels of `train.tasks` in a batch: carried columns, without the rows that are none of a task's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.config import Task, Train
from headrace.errors import UserError
from headrace.features.table_ops.row_expression import RowExpression
from headrace.schema import DatasetSchema
from headrace.train.carried_expressions import columns_of, evaluate, parse_condition

F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
_DAY_MICROS = 86_400 * 1_000_000


class TaskLabels:
    """Which label each row has for each task.

    Args:
        train: with `tasks`.
        schema: the dataset's.
        ds: the day of the run: labels are known as of its end (UTC).

    Raises:
        UserError: a label is text or no carried column, or a feature is made of it; a condition or a time is no such.
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
        #: By task: the column of its rows' times, and the last time of which the label is known.
        self._known_until: dict[str, tuple[str, int]] = {
            name: (_time_column(name, task, schema), end - round(task.known_after.days * _DAY_MICROS))
            for name, task in train.tasks.items()
            if task.known_after is not None
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks besides the first, whose labels are the dataset's."""
        return tuple(name for name in self._tasks if name != self._first)

    @property
    def carried(self) -> tuple[str, ...]:
        """The carried columns that labels are made of, by the dataset's names; empty without tasks."""
        conditions = [self._schema.carried_name(c) for c in columns_of(self._conditions.values())]
        times = [column for column, _ in self._known_until.values()]
        return tuple(dict.fromkeys([*self._labels.values(), *conditions, *times]))

    def beside(self, columns: Iterable[str]) -> list[str]:
        """Carried columns and those that labels are made of, each once."""
        return list(dict.fromkeys([*columns, *self.carried]))

    def of(self, labels: F32, carried: Mapping[str, npt.NDArray[Any]]) -> dict[str, F32]:
        """The labels of rows for each task but the first: float32 [B], NaN where a row is none of the task's.

        Args:
            labels: of the first task, float32 [B].
            carried: the columns `carried`, [B].

        Raises:
            UserError: a label that is none.
        """
        if not len(labels):  # carried columns have no type
            return {name: np.empty(0, np.float32) for name in self.names}
        found: dict[str, F32] = {} if self._first is None else {self._first: labels}
        # Which rows a task could have, whatever earlier tasks say of them.
        spaces = {name: self._space(name, len(labels), carried) for name in self._tasks}
        for name, task in self._tasks.items():
            if name == self._first:
                continue
            if task.product:
                target = _product([found[other] for other in task.product])
                space = np.logical_and.reduce([spaces[name], *(spaces[other] for other in task.product)])
            else:
                target, space = self._checked(name, task, carried[self._labels[name]]), spaces[name]
            if task.where in self._tasks:
                space = space & (found[str(task.where)] == 1)
            found[name] = np.where(space, target, np.float32(np.nan))
        return {name: found[name] for name in self.names}

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
        found = np.asarray([np.nan if v is None else v for v in values] if values.dtype == object else values)
        target = found.astype(np.float32)
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
    """The product of labels: 0 where one is 0, NaN where one of the others is not known."""
    stacked = np.stack(targets)
    known: F32 = np.where((stacked == 0).any(0), np.float32(0), stacked.prod(0))
    return known


def _is_true(
    condition: RowExpression, carried: Mapping[str, npt.NDArray[Any]], schema: DatasetSchema, where: str
) -> Bools:
    values = evaluate(condition, carried, schema, where)
    found: Bools = values.fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    return found


def _label_column(name: str, task: Task, schema: DatasetSchema) -> str:
    assert task.label is not None
    where = f"train.tasks.{name}.label: the column '{task.label}'"
    feature = schema.carried_columns.get(task.label)
    if feature is None:
        raise UserError(f"{where} is not carried by the dataset; name it in features.carried")
    if feature.dtype == "string":
        raise UserError(f"{where} is text; labels are numbers or booleans")
    leaks = [f.name for f in schema.features if task.label in f.sources]
    if leaks:
        raise UserError(f"{where} is what the feature '{leaks[0]}' is made of, which would leak the label")
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
