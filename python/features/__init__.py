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
    # For type checkers: the operators of each family.
    from headrace.config.schema import TableColumn as TableColumn
    from headrace.features.ops.base import AddMetadata as AddMetadata
    from headrace.features.ops.base import AddTags as AddTags
    from headrace.features.ops.bins import *  # noqa: F403
    from headrace.features.ops.categories import *  # noqa: F403
    from headrace.features.ops.groups import *  # noqa: F403
    from headrace.features.ops.hashing import *  # noqa: F403
    from headrace.features.ops.lists import *  # noqa: F403
    from headrace.features.ops.numbers import *  # noqa: F403  # noqa: F403
    from headrace.features.ops.numbers import Log as Log
    from headrace.features.ops.numbers import ReduceDtype as ReduceDtype
    from headrace.features.ops.rename import *  # noqa: F403
    from headrace.features.ops.times import *  # noqa: F403
    from headrace.features.spark.fit import fit as fit
    from headrace.features.spark.transform import transform as transform
    from headrace.features.workflow.fitted import FittedWorkflow as FittedWorkflow
    from headrace.features.workflow.workflow import Workflow as Workflow

    LogOp, ReduceDtypeSize = Log, ReduceDtype

_MODULES = {
    "AddMetadata": "headrace.features.ops.base",
    "AddTags": "headrace.features.ops.base",
    "FittedWorkflow": "headrace.features.workflow.fitted",
    "TableColumn": "headrace.config.schema",
    "Workflow": "headrace.features.workflow.workflow",
    "fit": "headrace.features.spark.fit",
    "transform": "headrace.features.spark.transform",
}
#: NVTabular's names of operators that have another one here.
ALIASES = {"LogOp": "Log", "ReduceDtypeSize": "ReduceDtype"}


def _operators() -> dict[str, str]:
    """Return the `module:Class` of each operator by the name of its class."""
    seam = import_module("headrace.features.ops").OPERATORS
    by_class = {reference.rpartition(":")[2]: reference for reference in seam.builtin.values()}
    return by_class | {alias: by_class[name] for alias, name in ALIASES.items()}


def __getattr__(name: str) -> Any:
    # A module of this package is asked for like this, too, before it is imported: operators are classes.
    reference = _MODULES.get(name) or (_operators().get(name) if name[:1].isupper() else None)
    if reference is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted({*_operators(), *_MODULES})
