"""Table operators once more, by pyarrow and NumPy: what the Spark bodies are held against, to the bit.

Tests without a JVM hold these against loops over all pairs of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from headrace.features.table_ops.base import PROBE, TrainRows
from headrace.features.table_ops.external import Reader
from headrace.features.table_ops.preparation import Preparation
from tests.arrow_table_ops import bodies, external, joins
from tests.arrow_table_ops.negatives import negatives
from tests.arrow_table_ops.place import Place

#: By the operator's name. `lambda` is an expression of Spark's SQL.
BODIES: dict[str, Callable[[Any, pa.Table, Place], pa.Table]] = {
    "dropna": bodies.dropna,
    "filter": bodies.filter_,
    "history": bodies.history,
    "join_asof": joins.join_asof,
    "join_external": joins.join_external,
    "lag": bodies.lag,
    "negatives": negatives,
    "rename": bodies.rename,
    "sessions": bodies.sessions,
    "target_encoding_past": bodies.target_encoding_past,
    "trailing": bodies.trailing,
}


def by_arrow(p: Preparation, table: pa.Table, reader: Reader, train: TrainRows | None = None) -> pa.Table:
    """The rows that `p.spark` makes, in any order."""
    if PROBE not in table.schema.names:
        table = table.append_column(PROBE, pa.nulls(table.num_rows, pa.string()))
    for stand in p.stands:
        table = BODIES[stand.op.name](stand.op, table, Place(stand.given, partial(external.read, reader), train))
    return table
