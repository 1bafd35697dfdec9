"""The table operators by name. One more is one class in one file, and its line here."""

from __future__ import annotations

from headrace.features.table_ops.attribution import Attribution
from headrace.features.table_ops.base import TableOp
from headrace.features.table_ops.joins import JoinAsof, JoinExternal
from headrace.features.table_ops.negatives import Negatives
from headrace.features.table_ops.rows import Dropna, Filter, Lambda, Rename
from headrace.features.table_ops.sequences import History, Lag, Sessions
from headrace.features.table_ops.trailing import TargetEncodingPast, Trailing

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
