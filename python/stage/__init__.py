"""Stages: their protocol, the manifests that they leave, the resources that they use.

The names in `__all__` are those that a stage of another package needs: `from headrace.stage import PackageStage`. A
name's module is imported at first use, so that readers of manifests do not import the spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import lazy_names

if TYPE_CHECKING:
    from headrace.stage.manifest import Input as Input
    from headrace.stage.manifest import Manifest as Manifest
    from headrace.stage.manifest import Output as Output
    from headrace.stage.protocol import Context as Context
    from headrace.stage.protocol import Outcome as Outcome
    from headrace.stage.protocol import PackageStage as PackageStage
    from headrace.stage.protocol import Result as Result
    from headrace.stage.protocol import RunLock as RunLock
    from headrace.stage.protocol import RunPlan as RunPlan
    from headrace.stage.protocol import Stage as Stage
    from headrace.stage.protocol import check_lock as check_lock
    from headrace.stage.protocol import check_stage as check_stage
    from headrace.stage.protocol import execute as execute
    from headrace.stage.protocol import identity as identity
    from headrace.stage.protocol import package_stage as package_stage
    from headrace.stage.protocol import plan_run as plan_run
    from headrace.stage.protocol import run_lock as run_lock
    from headrace.stage.protocol import run_stage as run_stage
    from headrace.stage.protocol import stage_entries as stage_entries
    from headrace.stage.protocol import stage_entry as stage_entry
    from headrace.stage.protocol import stage_order as stage_order

__getattr__ = lazy_names(
    __name__,
    {
        ".manifest": ("Input", "Manifest", "Output"),
        ".protocol": (
            "Context",
            "Outcome",
            "PackageStage",
            "Result",
            "RunLock",
            "RunPlan",
            "Stage",
            "check_lock",
            "check_stage",
            "execute",
            "identity",
            "package_stage",
            "plan_run",
            "run_lock",
            "run_stage",
            "stage_entries",
            "stage_entry",
            "stage_order",
        ),
    },
)
__all__ = [
    "Context",
    "Input",
    "Manifest",
    "Outcome",
    "Output",
    "PackageStage",
    "Result",
    "RunLock",
    "RunPlan",
    "Stage",
    "check_lock",
    "check_stage",
    "execute",
    "identity",
    "package_stage",
    "plan_run",
    "run_lock",
    "run_stage",
    "stage_entries",
    "stage_entry",
    "stage_order",
]
