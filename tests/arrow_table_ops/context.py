"""Context of a table operator over Arrow tables: what it is called with besides the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from headrace.features.table_ops.base import ExternalTable, TableSchema, TrainRange


@dataclass(frozen=True)
class ArrowTableContext:
    schema: TableSchema
    read: Callable[[ExternalTable], pa.Table]
    train: TrainRange | None = None
