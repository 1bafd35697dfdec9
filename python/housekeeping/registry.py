"""Versions and runs in the registry of days of which nothing else is left."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from headrace.housekeeping.models import REGISTERED_SUFFIXES
from headrace.housekeeping.step import Step
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.registry.retention import old_records, remove_records


def registry_steps(state: WorkspaceState) -> Iterator[Step]:
    """Where manifests of old days go: what MLflow has of a day without any, which has no model and nothing else."""
    first = state.first_day(state.keep.manifests)
    days = set(state.ws.days(state.pipeline))
    for suffix in REGISTERED_SUFFIXES if first else ():
        name = state.pipeline + suffix
        if records := old_records(state.ws, name, first, days):
            what = f"{len(records)} trainings of {name} up to {records[-1].ds}"
            reason = f"before {first}, and nothing else of their days is left"
            yield Step("registry", what, reason, act=partial(remove_records, state.ws, name, records))
