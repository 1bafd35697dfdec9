"""A saved model and the workflow that it was trained on, for those that ask it of rows: loaded once in a process."""

from __future__ import annotations

from functools import lru_cache

from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.lake.spark.gpus import gpu_addresses, show_assigned_gpu
from headrace.models.predictor import Predictor, load_predictor, maps_of
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace, on_this_host


@lru_cache(maxsize=1)
def loaded_model(
    folder: Location,
    threads: int,
    output: str | None,
    maps: HostPlace | None,
    gpu: bool = False,
    joined: frozenset[str] = frozenset(),
) -> tuple[Predictor, FittedWorkflow]:
    """Loaded once in each Python worker, which Spark keeps for its next tasks; a model's folder never changes.

    `maps`: what workers of a host map of models: see Workspace.mapped. None: nothing. `gpu`: the model goes to the GPU
    that Spark assigned to the task, where it stays. `joined`: see TaskInputs.

    Raises:
        UserError: the model is damaged; or there is no such GPU.
    """
    mine = None if maps is None else maps_of(folder, on_this_host(maps))
    device = _device() if gpu else "cpu"
    predictor = load_predictor(folder, threads, output, mine, device, joined)
    return predictor, loaded_workflow(folder, maps)


@lru_cache(maxsize=1)
def loaded_workflow(folder: Location, maps: HostPlace | None) -> FittedWorkflow:
    """The workflow that a saved model was trained on; `maps`: see `loaded_model`."""
    vocabularies = None if maps is None else maps_of(folder, on_this_host(maps)) / "vocabularies"
    return FittedWorkflow.load(folder / "workflow", maps=vocabularies)


def _device() -> str:
    """The GPU of this task, and so of this process, for torch: an executor has one, and so its workers' tasks."""
    addresses = gpu_addresses()
    if not addresses:
        raise UserError("the tasks that score were to have a GPU each, and Spark assigned none to this one")
    show_assigned_gpu(addresses)
    return "cuda"
