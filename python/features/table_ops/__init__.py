"""The table operators by name. One more is one class in one file, and its line here."""

from __future__ import annotations

from headrace.features.table_ops.attribution import Attribution
from headrace.features.table_ops.base import TableOp
from headrace.features.table_ops.dropna import Dropna
from headrace.features.table_ops.filter import Filter
from headrace.features.table_ops.history import History
from headrace.features.table_ops.join_asof import JoinAsof
from headrace.features.table_ops.join_external import JoinExternal
from headrace.features.table_ops.lag import Lag
from headrace.features.table_ops.lambda_ import Lambda
from headrace.features.table_ops.negatives import Negatives
from headrace.features.table_ops.rename import Rename
from headrace.features.table_ops.sessions import Sessions
from headrace.features.table_ops.target_encoding_past import TargetEncodingPast
from headrace.features.table_ops.trailing import Trailing

TABLE_OPS: dict[str, type[TableOp]] = {
    op.name: op
    for op in (
        Filter,
        Dropna,
        Lambda,
        Rename,
        JoinExternal,
        JoinAsof,
        Trailing,
        Lag,
        History,
        Sessions,
        TargetEncodingPast,
        Attribution,
        Negatives,
    )
}

__all__ = [
    "TABLE_OPS",
    "Attribution",
    "Dropna",
    "Filter",
    "History",
    "JoinAsof",
    "JoinExternal",
    "Lag",
    "Lambda",
    "Negatives",
    "Rename",
    "Sessions",
    "TableOp",
    "TargetEncodingPast",
    "Trailing",
]
