"""Lists as the dataset stores them, one Arrow list a row, and as models take them, padded to a fixed length.

A list ends at its last element that is not 0: zeros behind it are padding, or the codes of nulls, which mean the same
(nothing) to every model. So what is stored is as long as its values are, and reading it gives the padded rows again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import UserError
from headrace.schema import Feature

Array = npt.NDArray[Any]


def trim_zeros(padded: Array) -> pa.ListArray:
    """The rows of a matrix [rows, length] as lists without the zeros at their ends; no nulls."""
    rows, length = padded.shape
    there = padded != 0
    # From the right: how far it is to the last one that is not 0.
    lengths = np.where(there.any(axis=1), length - there[:, ::-1].argmax(axis=1), 0)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = padded[np.arange(length) < lengths[:, None]]
    element = pa.field("element", pa.from_numpy_dtype(padded.dtype), nullable=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=pa.list_(element))


def pad(lists: pa.ChunkedArray | pa.ListArray, out: Array, what: str) -> None:
    """Fill `out` [rows, length] with lists, 0 behind each list's end; vectorised over rows.

    Raises:
        UserError: a null list, a null element, or a list longer than `length`; `what` says where it stands.
    """
    at = 0
    for chunk in lists.chunks if isinstance(lists, pa.ChunkedArray) else [lists]:
        _pad(chunk, out[at : at + len(chunk)], what)
        at += len(chunk)


def _pad(lists: pa.ListArray, out: Array, what: str) -> None:
    rows, length = out.shape
    offsets = lists.offsets.to_numpy()
    elements = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    nulls = lists.null_count + elements.null_count
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    if nulls or longest > length:
        found = f"{nulls} nulls" if nulls else f"a list of {longest} values, and the schema says {length} at most"
        raise UserError(f"{what} has {found}. Delete the dataset's folder and run the features stage again")
    values = elements.to_numpy()
    if len(values) == rows * length:  # all are full
        out[:] = values.reshape(rows, length)
        return
    # Place by place, as matrices lie in memory: the values there of the lists that reach so far.
    out[:] = 0
    starts, which = offsets[:-1] - offsets[0], None
    for place in range(longest):
        reach = np.flatnonzero(lengths > place)
        if len(reach) < len(lengths):
            starts, lengths = starts[reach], lengths[reach]
            which = reach if which is None else which[reach]
        out[slice(None) if which is None else which, place] = values.take(starts + place)


def by_column(table: pa.Table, features: Sequence[Feature], what: str = "dataset") -> Mapping[str, Array]:
    """Stored features as the columns that models take: physical name -> [rows]. Raises UserError, see `pad`."""
    out: dict[str, Array] = {}
    for feature in features:
        column = table.column(feature.name)
        if not feature.is_list:
            (name,) = feature.physical
            out[name] = column.to_numpy()
            continue
        padded = np.empty((len(column), feature.length), column.type.value_type.to_pandas_dtype(), order="F")
        pad(column, padded, f"{what}: column '{feature.name}'")
        out |= {name: padded[:, i] for i, name in enumerate(feature.physical)}
    return out
