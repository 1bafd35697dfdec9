"""The table operators by name. To add one, write a class in the module of its family and name it here."""

from __future__ import annotations

from headrace.features.table_ops.base import TableOp
from headrace.plugins import Seam

_PACKAGE = __name__
#: `features.prepare`. One operator a line, so that two additions do not meet.
TABLE_OPERATORS = Seam(
    "headrace.table_operators",
    "table operator",
    TableOp,
    {
        "attribution": f"{_PACKAGE}.attribution:Attribution",
        "dropna": f"{_PACKAGE}.rows:Dropna",
        "filter": f"{_PACKAGE}.rows:Filter",
        "history": f"{_PACKAGE}.sequences:History",
        "join_asof": f"{_PACKAGE}.joins:JoinAsof",
        "join_external": f"{_PACKAGE}.joins:JoinExternal",
        "lag": f"{_PACKAGE}.sequences:Lag",
        "lambda": f"{_PACKAGE}.rows:Lambda",
        "last_events": f"{_PACKAGE}.last_events:LastEvents",
        "negatives": f"{_PACKAGE}.negatives:Negatives",
        "rename": f"{_PACKAGE}.rows:RenameColumns",
        "sessions": f"{_PACKAGE}.sequences:Sessions",
        "target_encoding_past": f"{_PACKAGE}.trailing:TargetEncodingPast",
        "trailing": f"{_PACKAGE}.trailing:Trailing",
    },
)
