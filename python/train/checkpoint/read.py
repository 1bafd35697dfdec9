"""Checkpoints: everything that a run needs to resume on any number of ranks as if it had never stopped.

    checkpoints/step-00000200/
        embeddings/...        rows and optimizer states by table and range (headrace.embeddings.checkpoint.shards)
        dynamic/...           tables of raw ids, if there are any (headrace.embeddings.checkpoint.dynamic)
        dense.safetensors     `model/<name>` and `optimizer/<number>/<state>`
        checkpoint.json       the loop's position and history, the dense file's checksum; written last

The folder appears by one rename when all ranks have written. A kill at any moment leaves the earlier checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from headrace.comm.base import Collective
from headrace.embeddings.checkpoint.dynamic import load_dynamic
from headrace.embeddings.checkpoint.files import FileRecord, load_tensors
from headrace.embeddings.checkpoint.shards import load_shards
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.errors import UserError
from headrace.errors.stores import ChangedInPlace
from headrace.storage import Location
from headrace.train.callbacks.progress import LoopProgress
from headrace.train.optim import DenseOptimizer

RECORD = "checkpoint.json"
DENSE = "dense.safetensors"
EMBEDDINGS = "embeddings"
DYNAMIC = "dynamic"


class CheckpointedModel(Protocol):
    """The parts of a model in a checkpoint: its sharded tables, and the rest as a state dict."""

    @property
    def embeddings(self) -> ShardedEmbeddings: ...

    #: Tables of raw ids.
    @property
    def dynamic(self) -> DynamicEmbeddings | None: ...

    def dense_state(self) -> dict[str, Any]: ...

    def load_dense_state(self, state: Mapping[str, Any]) -> Any: ...


class CheckpointRecord(BaseModel):
    """Content of checkpoint.json; `sha256` is the digest of this record with an empty `sha256`."""

    model_config = ConfigDict(extra="forbid")

    #: Fingerprint of the settings that must not change between a run and its continuation.
    config: str
    progress: LoopProgress
    dense: FileRecord
    sha256: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_copy(update={"sha256": ""}).model_dump_json().encode()).hexdigest()


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def list_steps(folder: Location) -> list[int]:
    """Return the steps of the committed checkpoints, newest first; loading them finds damage."""
    names = [p.name.removeprefix("step-") for p in folder.entries() if p.name.startswith("step-") and p.is_dir()]
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)


log = logging.getLogger("headrace.train")


def restore(
    folder: Location,
    model: CheckpointedModel,
    dense: DenseOptimizer,
    collective: Collective,
    *,
    config: str,
    check_fence: Callable[[], None] = lambda: None,
) -> LoopProgress | None:
    """Load the newest checkpoint that is complete on all ranks; return None without one. Collective.

    A damaged checkpoint is named in the log, and the one before it is tried. After None, model and optimizer may have
    parts of a damaged checkpoint: create new ones (only if `list_steps` is not empty).

    Args:
        folder: folder of the checkpoints.
        model: a new model, on all ranks.
        dense: the optimizer of the dense part.
        collective: the ranks.
        config: fingerprint of the settings that must not have changed.
        check_fence: called by the chief before it removes files of dead writers; does not return if another launch has
            begun, which may be writing such files.

    Raises:
        UserError: the checkpoints belong to another configuration.
    """
    if collective.world.is_chief:
        check_fence()
        folder.discard_unfinished()
    # All ranks use the chief's list, since a shared file system's listing may lag on another machine.
    steps = _from_chief(list_steps(folder), collective)
    for step in steps:
        path = folder / step_name(step)
        progress, problem = _try_load(path, model, dense, collective, config)
        if progress is not None:
            return progress
        if isinstance(problem, _ConfigMismatch):
            raise problem
        if problem is not None:
            log.warning("checkpoint %s is refused (%s); trying the one before", path.name, problem)
    return None


def restore_step(
    folder: Location, step: int, model: CheckpointedModel, dense: DenseOptimizer, collective: Collective, *, config: str
) -> None:
    """Load the checkpoint of one step. Collective.

    Raises:
        UserError: the checkpoint is damaged, here or on another rank.
    """
    path = folder / step_name(step)
    progress, problem = _try_load(path, model, dense, collective, config)
    if progress is None:
        raise problem or UserError(f"checkpoint {path} cannot be read on another rank; see that rank's message")


def _try_load(
    path: Location, model: CheckpointedModel, dense: DenseOptimizer, collective: Collective, config: str
) -> tuple[LoopProgress | None, UserError | None]:
    """Load a checkpoint; return its progress if all ranks could, else None and this rank's error, if it had one."""
    problem: UserError | None = None
    progress = None
    try:
        progress = _load(path, model, dense, config)
    except UserError as e:
        problem = e
    except ChangedInPlace as e:
        problem = UserError(f"{path} is damaged: {e}")
    failures = torch.tensor([0.0 if problem is None else 1.0])
    collective.all_reduce_sum([failures])
    return (progress if float(failures) == 0 else None), problem


class _ConfigMismatch(UserError):
    pass


def _from_chief(steps: list[int], collective: Collective) -> list[int]:
    chief_steps = torch.tensor(steps if collective.world.is_chief else [], dtype=torch.int64)
    return [int(s) for s in collective.all_gather(chief_steps)]


def _load(path: Location, model: CheckpointedModel, dense: DenseOptimizer, config: str) -> LoopProgress:
    try:
        record = CheckpointRecord.model_validate_json((path / RECORD).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path / RECORD} is missing") from None
    except ValidationError as e:
        raise UserError(f"{path / RECORD} is damaged: {e.errors()[0]['msg']}") from None
    if record.digest() != record.sha256:
        raise UserError(f"{path / RECORD} is damaged: its contents do not match its checksum")
    if record.config != config:
        raise _ConfigMismatch(
            f"{path} was written with another model, training or dataset configuration; "
            f"delete {path.parent} to train from the start"
        )
    tensors = load_tensors(path, record.dense)
    load_shards(model.embeddings, path / EMBEDDINGS, with_optimizer=True)
    if model.dynamic is not None:
        load_dynamic(model.dynamic, path / DYNAMIC, with_optimizer=True)
    model.load_dense_state(_below("model/", tensors))
    dense.load_state(_below("optimizer/", tensors))
    return record.progress


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
