"""Features of rows by name: the input of a saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.compute.jagged import JaggedArray
from headrace.config.schema import Feature

#: A feature of one value a row by its name, [n]; a list by its name as a JaggedArray, or padded with 0 as its physical
#: columns `name__0 ...`, [n] each.
FeatureColumns = Mapping[str, NDArray[Any] | JaggedArray]


def row_count(columns: FeatureColumns) -> int:
    """Return the number of rows, n; 0 without columns."""
    return next((len(column) for column in columns.values()), 0)


def jagged_of(columns: FeatureColumns, feature: Feature) -> JaggedArray:
    """Return a list feature's values. Raises KeyError if it is missing."""
    column = columns.get(feature.name)
    if isinstance(column, JaggedArray):
        return column
    return JaggedArray.of_padded(_side_by_side(columns, feature))


def matrix_of(columns: FeatureColumns, feature: Feature) -> NDArray[Any]:
    """Return a feature as [n, length], a list padded with 0. Raises KeyError if it is missing."""
    column = columns.get(feature.name)
    if isinstance(column, JaggedArray):
        return column.to_padded(feature.length)
    return _side_by_side(columns, feature)


def _side_by_side(columns: FeatureColumns, feature: Feature) -> NDArray[Any]:
    return np.stack([np.asarray(columns[name]) for name in feature.physical], axis=1)
