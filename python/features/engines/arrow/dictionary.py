"""Columns of a batch whose values are kept once each: operators then work on distinct values, not on rows.

Of Criteo's 26 categories most have far fewer values than rows, and Parquet stores them as a dictionary and numbers. An
operator that treats every value alone (`Op.by_value`) gives the same result on the dictionary, at a fraction of the
cost; the rows follow by one gather at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.features.engines.arrow.kernels import Indices
from headrace.features.ops.base import State
from headrace.features.vocabulary.keyed_table import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.binding import BoundOp


@dataclass(frozen=True)
class DictionaryColumn:
    """A column: its values, and for each row where among them its value is (None: a value a row, in order)."""

    values: pa.Array
    indices: Indices | None = None
    #: No value is twice among `values`.
    distinct: bool = False

    def decode(self) -> pa.Array:
        """A value a row."""
        return self.values if self.indices is None else self.values.take(pa.array(self.indices))

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> pa.Array:
        """The values of some rows."""
        return self.values.take(pa.array(rows if self.indices is None else self.indices[rows]))


def apply_op(
    step: BoundOp,
    columns: Mapping[str, DictionaryColumn],
    state: Mapping[str, State],
    lookup: Callable[[str], Lookup],
    table: Callable[[str], KeyedTable],
    identity: pa.Array | None,
) -> dict[str, DictionaryColumn]:
    """A chain's columns after one step, by the Arrow kernels of its operator; see `BoundOp.arrow`."""
    if not step.op.by_value:
        arrays = {name: column.decode() if name in step.inputs else column.values for name, column in columns.items()}
        out = step.arrow(arrays, state, lookup, table, identity)
        return {name: columns[name] if name in step.passthrough else DictionaryColumn(x) for name, x in out.items()}
    out = step.arrow({name: column.values for name, column in columns.items()}, state, _distinct(lookup), table, None)
    made_of = {name: of for name, (of,) in step.op.sources(step.inputs).items()} | {
        name: name for name in step.passthrough
    }
    return {name: DictionaryColumn(x, columns[made_of[name]].indices) for name, x in out.items()}


def _distinct(lookup: Callable[[str], Lookup]) -> Callable[[str], Any]:
    return lambda name: lookup(name).distinct
