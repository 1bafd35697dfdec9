"""The column that says which rows are a list (`model.loss.group`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import config
from headrace.errors import UserError
from headrace.schema import DatasetSchema


class ListColumn:
    """A carried column whose values are lists' names; see config.Loss.group.

    Args:
        column: its name in the dataset.
        rows_each: rows of a stream in a step: lists do not reach beyond, so that they are the same on any ranks.
    """

    def __init__(self, column: str, rows_each: int) -> None:
        self.column, self._rows_each = column, rows_each

    @staticmethod
    def asked(model: config.Model, train: config.Train, schema: DatasetSchema) -> ListColumn | None:
        """What `model.loss.group` asks for; None: it asks for nothing.

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

    def of(self, carried: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """Which list each row is of: int64 [B]; null is a value like any other."""
        values = carried[self.column]
        if values.dtype == object:
            values = np.array(["" if v is None else f"_{v}" for v in values])
        _, which = np.unique(values, return_inverse=True)
        first = np.arange(len(values), dtype=np.int64) // self._rows_each * len(values)
        found: npt.NDArray[np.int64] = first + which
        return found
