"""Feature engineering: operators, workflows, vocabularies, the dataset.

    from headrace.features import AddTags, Categorify, FillMissing, LogOp, Normalize, Workflow

    conts = ["price", "age"] >> FillMissing() >> LogOp() >> Normalize()
    cats = ["user_id", "item_id"] >> Categorify(min_count=2) >> AddTags("id")
    workflow = Workflow(conts + cats, columns=columns, label="clicked")

All operators of headrace.features.ops are here by their class names, some under NVTabular's too. Names are imported
when they are asked for: importing this package costs nothing, and only `fit` and `transform` import Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.features.ops.bins import Bucketize as Bucketize
    from headrace.features.ops.bins import QuantileBin as QuantileBin
    from headrace.features.ops.categories import Categorify as Categorify
    from headrace.features.ops.categories import DropLowCardinality as DropLowCardinality
    from headrace.features.ops.groups import JoinGroupby as JoinGroupby
    from headrace.features.ops.groups import TargetEncoding as TargetEncoding
    from headrace.features.ops.groups import ValueCount as ValueCount
    from headrace.features.ops.hashing import HashBucket as HashBucket
    from headrace.features.ops.hashing import HashedCross as HashedCross
    from headrace.features.ops.lists import ColumnSimilarity as ColumnSimilarity
    from headrace.features.ops.lists import ListSlice as ListSlice
    from headrace.features.ops.lists import Pad as Pad
    from headrace.features.ops.missing import FillMedian as FillMedian
    from headrace.features.ops.missing import FillMissing as FillMissing
    from headrace.features.ops.numbers import Clip as Clip
    from headrace.features.ops.numbers import Log as Log
    from headrace.features.ops.numbers import Normalize as Normalize
    from headrace.features.ops.numbers import NormalizeMinMax as NormalizeMinMax
    from headrace.features.ops.numbers import ReduceDtype as ReduceDtype
    from headrace.features.ops.rename import Rename as Rename
    from headrace.features.ops.selection import AddMetadata as AddMetadata
    from headrace.features.ops.selection import AddTags as AddTags
    from headrace.features.ops.times import Age as Age
    from headrace.features.ops.times import Cyclic as Cyclic
    from headrace.features.spark.fit import fit as fit
    from headrace.features.spark.transform import transform as transform
    from headrace.features.workflow.fitted import FittedWorkflow as FittedWorkflow
    from headrace.features.workflow.workflow import Workflow as Workflow
    from headrace.schema import TableColumn as TableColumn

    LogOp, ReduceDtypeSize = Log, ReduceDtype

_OTHERS = {
    "AddMetadata": "headrace.features.ops.selection",
    "AddTags": "headrace.features.ops.selection",
    "FittedWorkflow": "headrace.features.workflow.fitted",
    "TableColumn": "headrace.schema",
    "Workflow": "headrace.features.workflow.workflow",
    "fit": "headrace.features.spark.fit",
    "transform": "headrace.features.spark.transform",
}
#: NVTabular's names of operators that have another one here.
ALIASES = {"LogOp": "Log", "ReduceDtypeSize": "ReduceDtype"}


def __getattr__(name: str) -> Any:
    if name in _OTHERS:
        return getattr(import_module(_OTHERS[name]), name)
    # A module of this package is asked for like this, too, before it is imported: operators are classes.
    if name[:1].isupper():
        wanted = ALIASES.get(name, name)
        for op in import_module("headrace.features.ops").REGISTRY.values():
            if wanted == op.__name__:
                return op
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    ops = {op.__name__ for op in import_module("headrace.features.ops").REGISTRY.values()}
    return sorted({*ops, *_OTHERS, *(alias for alias, op in ALIASES.items() if op in ops)})
