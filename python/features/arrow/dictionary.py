"""Columns of a batch whose values are kept once each: operators then work on distinct values, not on rows.

Of Criteo's 26 categories most have far fewer values than rows, and Parquet stores them as a dictionary and numbers. An
operator that treats every value alone (`Op.by_value`) gives the same result on the dictionary, at a fraction of the
cost; the rows follow by one gather at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.arrow.kernels import Indices
from headrace.features.ops.base import State
from headrace.features.vocabulary.keyed_tables import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.workflow import BoundOp

#: Bytes of texts that are decoded at once, a value a row: texts that are kept once may be more than memory has, and
#: than the 2 GiB of an Arrow array.
DECODED_TEXT = 256 << 20


@dataclass(frozen=True)
class DictionaryColumn:
    """A column: its values, and for each row where among them its value is (None: a value a row, in order)."""

    values: pa.Array
    indices: Indices | None = None
    #: No value is twice among `values`.
    distinct: bool = False

    def decode(self) -> pa.Array:
        """Return a value for each row."""
        return self.values if self.indices is None else self.values.take(pa.array(self.indices))

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> pa.Array:
        """Return the values of some rows."""
        return self.values.take(pa.array(rows if self.indices is None else self.indices[rows]))

    def __len__(self) -> int:
        return len(self.values if self.indices is None else self.indices)

    def part(self, start: int, end: int) -> DictionaryColumn:
        """Return the rows from `start` to `end`."""
        if self.indices is None:
            return DictionaryColumn(self.values.slice(start, end - start), None, self.distinct)
        return DictionaryColumn(self.values, self.indices[start:end], self.distinct)

    def text_bytes(self) -> npt.NDArray[np.int64]:
        """Return bytes of each row's text. int64 [rows]."""
        if not len(self.values):
            return np.zeros(len(self), np.int64)
        ends = np.frombuffer(self.values.buffers()[1], np.int32)[self.values.offset :][: len(self.values) + 1]
        sizes = np.diff(ends) if self.indices is None else ends[1:][self.indices] - ends[:-1][self.indices]
        return sizes.astype(np.int64)


def text_ranges(columns: Iterable[DictionaryColumn], rows: int) -> list[tuple[int, int]]:
    """Return ranges of rows whose texts, when they are decoded, are together at most DECODED_TEXT a range.

    A row at least.

    Args:
        columns: those that are decoded. What has a value a row already counts for nothing.
        rows: of each of them.
    """
    texts = [c for c in columns if c.indices is not None and pa.types.is_string(c.values.type)]
    if sum(_most_text(c) for c in texts) <= DECODED_TEXT:
        return [(0, rows)]
    return ranges_of(np.sum([c.text_bytes() for c in texts], 0))


def _most_text(column: DictionaryColumn) -> int:
    """Return bytes of the decoded texts, at most; looks at the rows only where they are fewer than the values."""
    if len(column) < len(column.values):
        return int(column.text_bytes().sum())
    return len(column) * int(DictionaryColumn(column.values).text_bytes().max(initial=0))


def ranges_of(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranges of rows, each as long as its sizes add up to at most DECODED_TEXT; a row at least. int64 [rows]."""
    ends, edges = np.cumsum(sizes), [0]
    while edges[-1] < len(sizes):
        bytes_before = int(ends[edges[-1] - 1]) if edges[-1] else 0
        edges.append(max(int(np.searchsorted(ends, bytes_before + DECODED_TEXT, "right")), edges[-1] + 1))
    return list(pairwise(edges))


def apply_op(
    step: BoundOp,
    columns: Mapping[str, DictionaryColumn],
    state: Mapping[str, State],
    lookup: Callable[[str], Lookup],
    table: Callable[[str], KeyedTable],
    identity: pa.Array | None,
) -> dict[str, DictionaryColumn]:
    """Return a chain's columns after one step, by the Arrow kernels of its operator; see `BoundOp.arrow`."""
    if not step.op.by_value:
        pieces: dict[str, list[pa.Array]] = {}
        rows = max((len(columns[name]) for name in step.inputs), default=0)
        for start, end in text_ranges((columns[name] for name in step.inputs), rows):
            decoded = {name: columns[name].part(start, end).decode() for name in step.inputs}
            passed = {name: columns[name].values for name in step.passthrough}
            of_rows = None if identity is None else identity.slice(start, end - start)
            for name, x in step.arrow(decoded | passed, state, lookup, table, of_rows).items():
                pieces.setdefault(name, []).append(x)
        return {
            name: columns[name] if name in step.passthrough else DictionaryColumn(_joined(arrays))
            for name, arrays in pieces.items()
        }
    out = step.arrow({name: column.values for name, column in columns.items()}, state, _distinct(lookup), table, None)
    made_of = {name: arrays for name, (arrays,) in step.op.sources(step.inputs).items()} | {
        name: name for name in step.passthrough
    }
    return {name: DictionaryColumn(x, columns[made_of[name]].indices) for name, x in out.items()}


def _joined(pieces: list[pa.Array]) -> pa.Array:
    return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)


def _distinct(lookup: Callable[[str], Lookup]) -> Callable[[str], Any]:
    return lambda name: lookup(name).distinct
