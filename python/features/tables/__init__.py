"""The table operators by name. One more is one class in one file, and its line here."""

from __future__ import annotations

from headrace.features.tables.dropna import Dropna
from headrace.features.tables.filter import Filter
from headrace.features.tables.history import History
from headrace.features.tables.join_asof import JoinAsof
from headrace.features.tables.join_external import JoinExternal
from headrace.features.tables.lag import Lag
from headrace.features.tables.lambda_ import Lambda
from headrace.features.tables.negatives import Negatives
from headrace.features.tables.rename import Rename
from headrace.features.tables.sessions import Sessions
from headrace.features.tables.table_op import TableOp
from headrace.features.tables.target_encoding_past import TargetEncodingPast
from headrace.features.tables.trailing import Trailing

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
        Negatives,
    )
}

__all__ = [
    "TABLE_OPS",
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
