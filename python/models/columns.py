"""Features of rows by name, as a saved model is asked for their probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.jagged import JaggedArray
from headrace.schema import Feature

#: A feature of one value a row by its name, [n]; a list by its name as a JaggedArray, or padded with 0 as its physical
#: columns `name__0 ...`, [n] each.
FeatureColumns = Mapping[str, NDArray[Any] | JaggedArray]


def row_count(columns: FeatureColumns) -> int:
    """Rows, n; 0 where there are no columns."""
    return next((len(column) for column in columns.values()), 0)


def jagged_of(columns: FeatureColumns, feature: Feature) -> JaggedArray:
    """A list feature's values. Raises KeyError where it is not there."""
    found = columns.get(feature.name)
    if isinstance(found, JaggedArray):
        return found
    return JaggedArray.of_padded(_side_by_side(columns, feature))


def matrix_of(columns: FeatureColumns, feature: Feature) -> NDArray[Any]:
    """A feature as [n, length], a list padded with 0. Raises KeyError where it is not there."""
    found = columns.get(feature.name)
    if isinstance(found, JaggedArray):
        return found.to_padded(feature.length)
    return _side_by_side(columns, feature)


def _side_by_side(columns: FeatureColumns, feature: Feature) -> NDArray[Any]:
    return np.stack([np.asarray(columns[name]) for name in feature.physical], axis=1)
