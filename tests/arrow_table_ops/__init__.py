"""Table operators once more, by pyarrow and NumPy: what the Spark implementations are held against, to the bit.

Tests without a JVM hold these against loops over all pairs of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

from headrace.features.table_ops.base import QUERY, TrainRange
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from tests.arrow_table_ops import joins, operators
from tests.arrow_table_ops.context import ArrowTableContext
from tests.arrow_table_ops.negatives import negatives

#: By the operator's name. Those that treat each row alone have their own (`TableOp.arrow_rows`).
IMPLEMENTATIONS: dict[str, Callable[[Any, pa.Table, ArrowTableContext], pa.Table]] = {
    "history": operators.history,
    "join_asof": joins.join_asof,
    "join_external": joins.join_external,
    "lag": operators.lag,
    "negatives": negatives,
    "sessions": operators.sessions,
    "target_encoding_past": operators.target_encoding_past,
    "trailing": operators.trailing,
}


def by_arrow(p: Preparation, table: pa.Table, reader: ExternalReader, train: TrainRange | None = None) -> pa.Table:
    """The rows that `p.spark` makes, in any order."""
    if QUERY not in table.schema.names:
        table = table.append_column(QUERY, pa.nulls(table.num_rows, pa.string()))
    for step in p.steps:
        rows = step.op.arrow_rows(step.schema)
        if rows is not None:
            table = rows(table)
            continue
        table = IMPLEMENTATIONS[step.op.name](
            step.op, table, ArrowTableContext(step.schema, partial(joins.read, reader), train)
        )
    return table
