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

from headrace.features.ops.base import State
from headrace.features.vocabulary.keyed_table import KeyedTable
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.binding import Step

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Cells:
    """A column: its values, and for each row where among them its value is (None: a value a row, in order)."""

    values: pa.Array
    index: Index | None = None
    #: No value is twice among `values`.
    distinct: bool = False

    def rows(self) -> pa.Array:
        """A value a row."""
        return self.values if self.index is None else self.values.take(pa.array(self.index))

    def at(self, rows: npt.NDArray[np.int64]) -> pa.Array:
        """The values of some rows."""
        return self.values.take(pa.array(rows if self.index is None else self.index[rows]))


def advance(
    step: Step,
    cells: Mapping[str, Cells],
    state: Mapping[str, State],
    lookup: Callable[[str], Lookup],
    table: Callable[[str], KeyedTable],
    identity: pa.Array | None,
) -> dict[str, Cells]:
    """A chain's columns after one step, by the Arrow body of its operator; see `Step.arrow`."""
    if not step.op.by_value:
        given = {name: c.rows() if name in step.types else c.values for name, c in cells.items()}
        out = step.arrow(given, state, lookup, table, identity)
        return {name: cells[name] if name in step.passing else Cells(x) for name, x in out.items()}
    out = step.arrow({name: c.values for name, c in cells.items()}, state, _once(lookup), table, None)
    made_of = {name: of for name, (of,) in step.op.sources(step.types).items()} | {name: name for name in step.passing}
    return {name: Cells(x, cells[made_of[name]].index) for name, x in out.items()}


def _once(lookup: Callable[[str], Lookup]) -> Callable[[str], Any]:
    return lambda name: lookup(name).once
