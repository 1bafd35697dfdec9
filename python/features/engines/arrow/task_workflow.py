"""The fitted workflow in a worker process, which serves many tasks and reads it once."""

from __future__ import annotations

from functools import lru_cache

from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location


@lru_cache(maxsize=2)
def mapped(workflow: Location, maps: Location) -> FittedWorkflow:
    """To transform with: large vocabularies and keyed tables are files that all workers of the host map.

    Args:
        workflow: where it is saved.
        maps: of this workflow alone, on this host or where all hosts see it; made where it is not there yet.
    """
    return FittedWorkflow.load(workflow, maps=maps)


@lru_cache(maxsize=2)
def without_values(workflow: Location) -> FittedWorkflow:
    """To write what is transformed: no value is looked up, and none is in memory."""
    return FittedWorkflow.load(workflow, most_values=0)
