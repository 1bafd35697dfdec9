"""A row group's columns to matrices of batches: checked, and each value put where it belongs, in one pass.

A column of a row group fits a core's second-level cache, into which it was just read. There its values are picked in
the order that is wanted, and written side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.dataset import native
from headrace.dataset.native import Array, Order, OutputColumns
from headrace.dataset.parquet import lists
from headrace.dataset.parquet.row_group import StoredRowGroup
from headrace.errors import UserError
from headrace.schema import DatasetSchema, Feature, Kind


def write_features(
    stored: StoredRowGroup,
    schema: DatasetSchema,
    order: Order,
    continuous: OutputColumns,
    codes: OutputColumns,
    labels: OutputColumns,
    *,
    where: str,
) -> None:
    """Write what a model reads; lists padded.

    Args:
        stored: the row group's columns.
        order: which rows, in which order; a row may come more than once.
        continuous: float32 [C, parts of `order`].
        codes: int64 [S, the same].
        labels: float32 [1, the same].
        where: for messages.

    Raises:
        UserError: a null in a feature, a list above its length, or a code outside [0, cardinality). Raw ids may be any.
    """
    for features, out in (
        (schema.of(Kind.CONTINUOUS), continuous),
        (schema.of(Kind.CATEGORICAL), codes),
        ((schema.label,), labels),
    ):
        for place, (feature, name, values) in enumerate(_columns(stored, features, where)):
            largest = native.gather(values, order, out, place)
            if feature.kind is Kind.CATEGORICAL and not feature.dynamic:
                _check(largest, values, feature.cardinality or 0, f"{where}: column '{name}'")


def _columns(stored: StoredRowGroup, features: Sequence[Feature], where: str) -> Iterator[tuple[Feature, str, Array]]:
    """The features' physical columns: feature, name, values in stored order."""
    for feature in features:
        column = stored.column(feature.name)
        what = f"{where}: column '{feature.name}'"
        if feature.is_list:
            padded = np.empty((len(column), feature.length), column.type.value_type.to_pandas_dtype(), order="F")
            lists.pad(column, padded, what)
            yield from ((feature, name, values) for name, values in zip(feature.physical, padded.T, strict=True))
            continue
        if column.null_count:
            raise UserError(
                f"{what} has {column.null_count} nulls, which a model cannot "
                f"read; add fill_missing to its operators in features.workflow"
            )
        yield feature, feature.name, column.to_numpy()


def _check(largest: int, values: Array, cardinality: int, what: str) -> None:
    # As an unsigned number, what is below 0 is far above.
    if largest >= cardinality:
        raise UserError(
            f"{what} has codes {values.min()}..{values.max()}, outside its "
            f"vocabulary [0, {cardinality}). Delete the dataset's folder and run the features stage again"
        )
