"""A row group's columns to batches: checked, and each value put where it belongs, in one pass.

A column of a row group fits a core's second-level cache, into which it was just read. There its values are picked in
the order that is wanted, and written side by side. Lists stay offsets and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.dataset import native
from headrace.dataset.native import Array, Order, OutputColumns
from headrace.dataset.parquet import lists
from headrace.dataset.parquet.row_group import StoredRowGroup
from headrace.errors import UserError
from headrace.jagged import JaggedArray
from headrace.schema import DatasetSchema, Feature, Kind


class MatrixColumns:
    """Where numbers stand in a batch's matrix: a list has `length` columns of it.

    Args:
        features: those of the matrix, in its order.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        firsts = np.cumsum([0, *(len(f.physical) for f in features)]).tolist()
        #: Columns of the matrix.
        self.width: int = firsts[-1]
        #: Features of one value a row, and the column of each.
        self.scalars = tuple(f for f in features if not f.is_list)
        self.scalar_columns = tuple(c for f, c in zip(features, firsts, strict=False) if not f.is_list)
        #: List features, and the first column of each.
        self.lists = tuple((f, c) for f, c in zip(features, firsts, strict=False) if f.is_list)

    def fill(self, out: Array, scalars: Array, jagged: Mapping[str, Sequence[JaggedArray]]) -> None:
        """Fill a batch's matrix.

        Args:
            out: [width, rows].
            scalars: [scalars, rows].
            jagged: by list feature: all rows' lists, in parts of consecutive rows.
        """
        out[list(self.scalar_columns)] = scalars
        for feature, first in self.lists:
            padded = out[first : first + feature.length].T
            at = 0
            for part in jagged.get(feature.name, ()):
                lists.fill(padded[at : at + len(part)], part)
                at += len(part)


def write_features(
    stored: StoredRowGroup,
    schema: DatasetSchema,
    order: Order,
    continuous: OutputColumns,
    codes: OutputColumns,
    labels: OutputColumns,
    *,
    where: str,
) -> dict[str, JaggedArray]:
    """Write what a model reads of features with one value a row.

    Args:
        stored: the row group's columns.
        order: which rows, in which order; a row may come more than once.
        continuous: float32 [C', parts of `order`], C' features of one value a row.
        codes: int64 [S', the same].
        labels: float32 [1, the same].
        where: for messages.

    Returns:
        By list feature: the lists of the rows in `order`.

    Raises:
        UserError: a null in a feature, a list above its length, or a code outside [0, cardinality). Raw ids may be any.
    """
    jagged: dict[str, JaggedArray] = {}
    for features, out in (
        (schema.of(Kind.CONTINUOUS), continuous),
        (schema.of(Kind.CATEGORICAL), codes),
        ((schema.label,), labels),
    ):
        scalar = 0
        for feature in features:
            what = f"{where}: column '{feature.name}'"
            if feature.is_list:
                values = jagged[feature.name] = _lists(stored, feature, order, what)
                _check(_largest(values.values), values.values, feature, what)
                continue
            column = stored.column(feature.name)
            if column.null_count:
                raise UserError(
                    f"{what} has {column.null_count} nulls, which a model cannot "
                    f"read; add fill_missing to its operators in features.workflow"
                )
            array = column.to_numpy()
            _check(native.gather(array, order, out, scalar), array, feature, what)
            scalar += 1
    return jagged


def _lists(stored: StoredRowGroup, feature: Feature, order: Order, what: str) -> JaggedArray:
    column = stored.column(feature.name)
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    for chunk in chunks:
        lists.check(chunk, feature.length, what)
    offsets, values = lists.to_numpy(column.combine_chunks() if len(chunks) != 1 else chunks[0])
    return JaggedArray(*lists.take(offsets, values, order))


def _largest(values: Array) -> int:
    """As unsigned numbers, see `native.gather`; 0 of what are no integers."""
    return int(values.view(f"u{values.itemsize}").max()) if values.dtype.kind == "i" and len(values) else 0


def _check(largest: int, values: Array, feature: Feature, what: str) -> None:
    if feature.kind is not Kind.CATEGORICAL or feature.dynamic:
        return
    # As an unsigned number, what is below 0 is far above.
    if len(values) and largest >= (feature.cardinality or 0):
        raise UserError(
            f"{what} has codes {values.min()}..{values.max()}, outside its "
            f"vocabulary [0, {feature.cardinality or 0}). Delete the dataset's folder and run the features stage again"
        )
