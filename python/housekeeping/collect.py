"""All that can go, in order: what manifests name first, then what they no longer pin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime

from headrace.config import Spec
from headrace.housekeeping.compaction import compaction_steps
from headrace.housekeeping.folders import dataset_steps, log_steps, report_steps, search_steps
from headrace.housekeeping.manifests import manifest_steps
from headrace.housekeeping.models import mapped_steps, model_steps
from headrace.housekeeping.registry import registry_steps
from headrace.housekeeping.scratch import decoded_steps, scratch_steps
from headrace.housekeeping.step import Step
from headrace.housekeeping.tables import history_steps, row_steps, vacuum_steps
from headrace.housekeeping.unfinished import unfinished_steps
from headrace.housekeeping.warehouse import warehouse_steps
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.stage import run_lock
from headrace.workspace import Workspace

#: Each looks at what the ones before it have left.
_KINDS: tuple[Callable[[WorkspaceState], Iterator[Step]], ...] = (
    unfinished_steps,
    dataset_steps,
    model_steps,
    mapped_steps,
    search_steps,
    report_steps,
    log_steps,
    scratch_steps,
    decoded_steps,
    row_steps,
    compaction_steps,
    vacuum_steps,
    history_steps,
    warehouse_steps,
    manifest_steps,
    registry_steps,
)


def collect(spec: Spec, ws: Workspace, now: datetime, delete: bool) -> Iterator[Step]:
    """What can go, step by step, each after it is done where `delete` says so.

    May be killed anywhere: what is done stays done, and the next call does the rest.

    Args:
        spec: the pipeline.
        ws: the workspace.
        now: the clock, with its time zone.
        delete: do it; else nothing is changed, and nothing is locked.

    Raises:
        BusyError: a stage of the pipeline is at work (`delete` alone).
        UserError: a manifest cannot be read, a table has features that are not known, a warehouse cannot be reached.
    """
    with run_lock(ws, spec.pipeline) if delete else nullcontext() as lease:
        for kind in _KINDS:
            for step in kind(WorkspaceState(spec, ws, now, lease)):
                if lease is not None:
                    lease.check()
                    step.act()
                yield step
