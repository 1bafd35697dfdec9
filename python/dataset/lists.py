"""Lists as the dataset stores them, one Arrow list a row, and as matrices, padded to a fixed length.

A list ends at its last element that is not 0: zeros behind it are padding, or the codes of nulls, which mean the same
(nothing) to every model. So what is stored is as long as its values are, and reading it gives the padded rows again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.compute.jagged import JaggedArray
from headrace.config.schema import Feature
from headrace.dataset import native
from headrace.errors import UserError

Array = npt.NDArray[Any]


def from_arrays(offsets: Array, values: Array) -> pa.ListArray:
    """Return lists as the dataset has them: no null list, no null element.

    Args:
        offsets: [rows + 1]; list i is values[offsets[i]:offsets[i + 1]].
        values: numbers of any type.
    """
    element = pa.field("element", pa.from_numpy_dtype(values.dtype), nullable=False)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), type=pa.list_(element))


def trim_zeros(lists: pa.ListArray) -> pa.ListArray:
    """Return lists without the zeros at their ends. Neither list nor element may be null."""
    offsets, values = to_numpy(lists)
    nonzero = np.flatnonzero(values)
    # Of each list's end the number of values before it that are not 0; the last of these ends the list.
    nonzero_before = np.searchsorted(nonzero, offsets[1:])
    ends = (
        np.where(nonzero_before > 0, nonzero[nonzero_before - 1] + 1, 0)
        if len(nonzero)
        else np.zeros(len(lists), np.int64)
    )
    lengths = np.maximum(ends - offsets[:-1], 0)
    trimmed = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(lengths, out=trimmed[1:])
    if trimmed[-1] < len(values):
        values = values.take(_positions(offsets[:-1], trimmed))
    return from_arrays(trimmed, values)


def to_numpy(lists: pa.ListArray) -> tuple[Array, Array]:
    """Return (offsets int32 [rows + 1], beginning at 0; values), in the array's memory where they can be. No nulls."""
    offsets = lists.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    return offsets - first if first else offsets, lists.values.slice(first, last - first).to_numpy()


def take(offsets: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """Return lists of some rows, in their order: (offsets int32 [n + 1], values).

    Args:
        offsets: [rows + 1], beginning at 0.
        values: all lists' values, one list behind the other.
        rows: [n]; a row may come more than once.
    """
    starts = offsets[:-1].take(rows)
    taken = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(offsets[1:].take(rows) - starts, out=taken[1:])
    gathered = native.gather_lists(offsets, values, rows, taken)
    return taken, values.take(_positions(starts, taken)) if gathered is None else gathered


def _positions(starts: Array, offsets: Array) -> Array:
    """Return the positions of values of lists that begin at `starts` and are as long as `offsets` says: int64
    [offsets[-1]].
    """
    return np.repeat(starts.astype(np.int64) - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])


def pad(lists: pa.ChunkedArray | pa.ListArray, out: Array, subject: str) -> None:
    """Fill `out` [rows, length] with lists, 0 behind each list's end; vectorised over rows.

    Raises:
        UserError: a null list, a null element, or a list longer than `length`; `subject` says where it stands.
    """
    row = 0
    for chunk in lists.chunks if isinstance(lists, pa.ChunkedArray) else [lists]:
        check(chunk, out.shape[1], subject)
        fill(out[row : row + len(chunk)], JaggedArray(*to_numpy(chunk)))
        row += len(chunk)


def check(lists: pa.ListArray, length: int, subject: str) -> None:
    """Raise UserError where there is a null list, a null element, or a list of more than `length` values."""
    offsets = lists.offsets.to_numpy()
    nulls = lists.null_count + lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).null_count
    longest = int(np.diff(offsets).max(initial=0))
    if nulls or longest > length:
        fault = f"{nulls} nulls" if nulls else f"a list of {longest} values, and the schema says {length} at most"
        raise UserError(f"{subject} has {fault}. Delete the dataset's folder and run the features stage again")


def fill(out: Array, lists: JaggedArray) -> None:
    """Fill `out` [rows, length] with lists, none longer than `length`: 0 behind each list's end.

    Args:
        out: of the values' type, or int64 for int32.
        lists: of int32 offsets.
    """
    if not native.pad_lists(lists.offsets, lists.values, out):
        out[:] = lists.to_padded(out.shape[1])


def by_column(table: pa.Table, features: Sequence[Feature], subject: str = "dataset") -> Mapping[str, Array]:
    """Return stored features as the columns that models take: physical name -> [rows]. Raises UserError, see `pad`."""
    out: dict[str, Array] = {}
    for feature in features:
        column = table.column(feature.name)
        if not feature.is_list:
            (name,) = feature.physical
            out[name] = column.to_numpy()
            continue
        padded = np.empty((len(column), feature.length), column.type.value_type.to_pandas_dtype(), order="F")
        pad(column, padded, f"{subject}: column '{feature.name}'")
        out |= {name: padded[:, i] for i, name in enumerate(feature.physical)}
    return out
