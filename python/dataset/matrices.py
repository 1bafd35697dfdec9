"""A row group as matrices: checked, and its rows put in another order on the way, column by column.

A column of a row group fits a core's second-level cache. So it is gone over while it is there: first in its own order,
to check it, then at random, to give its rows their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataset import lists, native
from headrace.dataset.batch import Batch
from headrace.dataset.buffers import Buffers
from headrace.dataset.layout import RowGroup
from headrace.dataset.row_group import StoredRowGroup
from headrace.errors import UserError
from headrace.schema import DatasetSchema, Feature, Kind

Array = npt.NDArray[Any]
Order = npt.NDArray[np.int32]


def to_batch(
    stored: StoredRowGroup,
    schema: DatasetSchema,
    carried: Sequence[str],
    group: RowGroup,
    order: Order | None,
    buffers: Buffers,
) -> Batch:
    """A row group as matrices, lists padded; `codes` keep their stored width here.

    Args:
        stored: the row group's columns.
        carried: those of them that no model reads.
        group: where they are from, for messages.
        order: which rows, in which order; a row may come more than once. None: all, as they are.
        buffers: where the memory comes from.

    Raises:
        UserError: a null in a feature, a list above its length, or a code outside [0, cardinality). Raw ids may be any.
    """
    where = f"{group.path}, row group {group.index}"
    rows = stored.num_rows if order is None else len(order)

    def matrix(features: Sequence[Feature], dtype: type) -> Array:
        # Column by column in memory, as the file is: a copy a column, where rows would scatter each of its numbers.
        found = buffers.empty((sum(len(f.physical) for f in features), rows), dtype)
        at = 0
        for feature in features:
            for column, values in _columns(stored, feature, where):
                if feature.kind is Kind.CATEGORICAL and not feature.dynamic:
                    _check(values, feature.cardinality or 0, column, where)
                if order is None:
                    found[at] = values
                else:
                    native.gather(values, order, found[at])
                at += 1
        return found.T

    categorical = schema.of(Kind.CATEGORICAL)
    return Batch(
        matrix(schema.of(Kind.CONTINUOUS), np.float32),
        matrix(categorical, np.int32 if _narrow(stored, categorical) else np.int64),
        matrix((schema.label,), np.float32)[:, 0],
        {name: _carried(stored.column(name), order) for name in carried},
    )


def _columns(stored: StoredRowGroup, feature: Feature, where: str) -> Iterator[tuple[str, Array]]:
    """A feature's physical columns: name, values in stored order."""
    column = stored.column(feature.name)
    what = f"{where}: column '{feature.name}'"
    if feature.is_list:
        padded = np.empty((len(column), feature.length), column.type.value_type.to_pandas_dtype(), order="F")
        lists.pad(column, padded, what)
        yield from zip(feature.physical, padded.T, strict=True)
        return
    if column.null_count:
        raise UserError(f"{what} has {column.null_count} nulls, which a model cannot "
                        f"read; add fill_missing to its operators in features.workflow")  # fmt: skip
    (name,) = feature.physical
    yield name, column.to_numpy()


def _check(values: Array, cardinality: int, column: str, where: str) -> None:
    # One pass: below 0 is far above as an unsigned number.
    if not len(values) or int(values.view(f"u{values.itemsize}").max()) < cardinality:
        return
    raise UserError(
        f"{where}: column '{column}' has codes {values.min()}..{values.max()}, outside its "
        f"vocabulary [0, {cardinality}). Delete the dataset's folder and run the features stage again"
    )


def _carried(column: pa.ChunkedArray | pa.Array, order: Order | None) -> Array:
    # Text and the like: objects.
    values: Array = column.to_numpy(**({"zero_copy_only": False} if isinstance(column, pa.Array) else {}))
    return values if order is None else values[order]


def _narrow(stored: StoredRowGroup, categorical: Sequence[Feature]) -> bool:
    types = (stored.type_of(f.name) for f in categorical)
    return all((t.value_type if pa.types.is_list(t) else t) == pa.int32() for t in types)
