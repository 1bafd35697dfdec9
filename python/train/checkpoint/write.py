"""Checkpoints: all that a run needs to go on as if it had never stopped, on any number of ranks.

    checkpoints/step-00000200/
        embeddings/...        rows and optimizer states by table and range (headrace.embeddings.checkpoint.shards)
        dynamic/...           tables of raw ids, where there are any (headrace.embeddings.checkpoint.dynamic)
        dense.safetensors     `model/<name>` and `optimizer/<number>/<state>`
        checkpoint.json       the loop's position and history, the dense file's checksum; written last

The folder appears by one rename when all ranks have written. A kill at any moment leaves the checkpoints there were.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from headrace.comm.base import Collective
from headrace.embeddings.checkpoint.dynamic import load_dynamic, save_dynamic
from headrace.embeddings.checkpoint.shards import load_shards, save_shards, shared_directory, write_index
from headrace.embeddings.checkpoint.tensors import FileRecord, load_tensors, save_tensors
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.errors import UserError
from headrace.storage import local
from headrace.train.job import list_steps, step_name
from headrace.train.optim.dense import DenseOptimizer

log = logging.getLogger("headrace.train")
_RECORD = "checkpoint.json"
_DENSE = "dense.safetensors"
_EMBEDDINGS = "embeddings"
_DYNAMIC = "dynamic"


class Model(Protocol):
    """What a checkpoint needs of a model: its sharded tables, and the rest as a state dict."""

    @property
    def embeddings(self) -> ShardedEmbeddings: ...

    #: Tables of raw ids.
    @property
    def dynamic(self) -> DynamicEmbeddings | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class Progress(BaseModel):
    """Where the loop is and what it has said so far."""

    model_config = ConfigDict(extra="forbid")

    #: Steps taken.
    step: int = 0
    #: Seconds of training, over all runs.
    seconds: float = 0.0
    #: Sum of losses, steps and seconds since the last point of the curve.
    open_loss: float = 0.0
    open_steps: int = 0
    open_seconds: float = 0.0
    curve: list[dict[str, float]] = Field(default_factory=list)
    evals: list[dict[str, float | None]] = Field(default_factory=list)

    @property
    def best(self) -> int | None:
        """Place in `evals` of the lowest log loss, the first of equals; None before the first evaluation."""
        losses = [math.inf if e["log_loss"] is None else e["log_loss"] for e in self.evals]
        return losses.index(min(losses)) if losses else None

    @property
    def best_step(self) -> int | None:
        """The step that `best` was evaluated at."""
        return None if self.best is None else int(self.evals[self.best]["step"] or 0)

    def has_stalled(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations did not improve on the one before them."""
        return patience is not None and self.best is not None and len(self.evals) - 1 - self.best >= patience


class _Record(BaseModel):
    """checkpoint.json. `sha256` is of this record with an empty one."""

    model_config = ConfigDict(extra="forbid")

    #: Fingerprint of what must not change between a run and its continuation.
    config: str
    progress: Progress
    dense: FileRecord
    sha256: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_copy(update={"sha256": ""}).model_dump_json().encode()).hexdigest()


class Saver:
    """Writes checkpoints `folder/step-NNNNNNNN`, now or while training goes on. All its methods are collective.

    In the background, `save` copies what is to be written (a second time the memory of the rank's rows) and returns; a
    thread of each rank writes it; `poll`, called after each step, makes it visible `lag` steps later, or `finish` at
    once. Between, a kill leaves the checkpoints there were.
    """

    def __init__(
        self,
        folder: Path,
        collective: Collective,
        *,
        config: str,
        keep: int,
        may_commit: Callable[[], None],
        background: bool = False,
        lag: int = 1,
    ) -> None:
        """See the class.

        Args:
            folder: of all checkpoints of a run.
            collective: the ranks; they share the file system.
            config: fingerprint of what must not change between a run and its continuation.
            keep: the newest so many stay.
            may_commit: called by the chief before the rename; raises where another launch has taken over.
            background: see the class.
            lag: steps, the same on all ranks.
        """
        self._folder, self._collective, self._config, self._keep = folder, collective, config, keep
        self._may_commit, self._background, self._lag = may_commit, background, lag
        self._open: _Open | None = None

    def save(self, model: Model, dense: DenseOptimizer, progress: Progress, keep_step: int | None = None) -> None:
        """Begin the checkpoint of `progress.step`, after finishing the one before. `keep_step` outlives the others."""
        self.finish()
        final = self._folder / step_name(progress.step)
        tensors = {f"model/{k}": v for k, v in model.state_dict().items()}
        tensors |= {f"optimizer/{k}": v for k, v in dense.state().items()}
        embeddings, dynamic = model.embeddings, model.dynamic
        if self._background:
            embeddings, progress = embeddings.snapshot(), progress.model_copy(deep=True)
            dynamic = None if dynamic is None else dynamic.snapshot()
            tensors = {k: v.clone() for k, v in tensors.items()}
        stack = ExitStack()
        partial = stack.enter_context(shared_directory(final, self._collective))

        def write() -> FileRecord | None:
            save_shards(embeddings, partial / _EMBEDDINGS, with_optimizer=True)
            if dynamic is not None:
                save_dynamic(dynamic, partial / _DYNAMIC)
            return save_tensors(partial / _DENSE, tensors) if self._collective.world.is_chief else None

        self._open = _Open(stack, partial, progress, keep_step, _Work(write, self._background))
        if not self._background:
            self.finish()

    def poll(self, step: int) -> None:
        """Finish what was begun `lag` steps ago."""
        if self._open is not None and step >= self._open.progress.step + self._lag:
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun, and make it visible; then remove all but the newest.

        Raises:
            OSError: this rank could not write (and whatever else stopped it).
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        with opened.stack:
            try:
                written = opened.work.result()
            except OSError as e:
                free = shutil.disk_usage(self._folder).free / 2**30
                raise OSError(
                    e.errno,
                    f"the checkpoint of step {opened.progress.step} could not be written ({e.strerror}; "
                    f"{free:.1f} GiB free in {self._folder})",
                ) from e
            self._collective.barrier()
            if written is not None:
                write_index(opened.partial / _EMBEDDINGS)
                record = _Record(config=self._config, progress=opened.progress, dense=written)
                record = record.model_copy(update={"sha256": record.digest()})
                local(opened.partial / _RECORD).put_text(record.model_dump_json() + "\n")
                self._may_commit()
        if self._collective.world.is_chief:
            for old in list_steps(self._folder)[self._keep :]:
                if old != opened.keep_step:
                    shutil.rmtree(self._folder / step_name(old))


@dataclass
class _Open:
    """A checkpoint that is being written."""

    stack: ExitStack
    partial: Path
    progress: Progress
    keep_step: int | None
    work: _Work


class _Work:
    """A call, now or in a thread; its result, or its error, is had later."""

    def __init__(self, call: Callable[[], FileRecord | None], background: bool) -> None:
        self._call = call
        self._result: FileRecord | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if background else None
        if self._thread is None:
            self._run()
        else:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as e:
            self._error = e

    def result(self) -> FileRecord | None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


def restore(
    folder: Path, model: Model, dense: DenseOptimizer, collective: Collective, *, config: str
) -> Progress | None:
    """Load the newest checkpoint that is whole on all ranks; None where there is none. Collective.

    A damaged one is refused by name in the log and the one before is tried. After None, model and optimizer may hold
    parts of a refused one: make them anew (that is so only where `list_steps` is not empty).

    Raises:
        UserError: the checkpoints belong to another configuration.
    """
    if collective.world.is_chief:
        for leftover in folder.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
    # The chief's list is everybody's: a listing of a shared file system may lag on another machine.
    steps = _from_chief(list_steps(folder), collective)
    for step in steps:
        path = folder / step_name(step)
        progress, problem = _try(path, model, dense, collective, config)
        if progress is not None:
            return progress
        if isinstance(problem, _OtherConfig):
            raise problem
        if problem is not None:
            log.warning("checkpoint %s is refused (%s); trying the one before", path.name, problem)
    return None


def restore_step(
    folder: Path, step: int, model: Model, dense: DenseOptimizer, collective: Collective, *, config: str
) -> None:
    """Load the checkpoint of one step. Collective.

    Raises:
        UserError: it is damaged, here or on another rank.
    """
    path = folder / step_name(step)
    progress, problem = _try(path, model, dense, collective, config)
    if progress is None:
        raise problem or UserError(f"checkpoint {path} cannot be read on another rank; see that rank's message")


def _try(
    path: Path, model: Model, dense: DenseOptimizer, collective: Collective, config: str
) -> tuple[Progress | None, UserError | None]:
    """Load a checkpoint: its progress where all ranks could; else None, and what this rank stumbled over, if it did."""
    problem: UserError | None = None
    progress = None
    try:
        progress = _load(path, model, dense, config)
    except UserError as e:
        problem = e
    failures = torch.tensor([0.0 if problem is None else 1.0])
    collective.all_reduce_sum([failures])
    return (progress if float(failures) == 0 else None), problem


class _OtherConfig(UserError):
    pass


def _from_chief(steps: list[int], collective: Collective) -> list[int]:
    mine = torch.tensor(steps if collective.world.is_chief else [], dtype=torch.int64)
    return [int(s) for s in collective.all_gather(mine)]


def _load(path: Path, model: Model, dense: DenseOptimizer, config: str) -> Progress:
    try:
        record = _Record.model_validate_json((path / _RECORD).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path / _RECORD} is missing") from None
    except ValidationError as e:
        raise UserError(f"{path / _RECORD} is damaged: {e.errors()[0]['msg']}") from None
    if record.digest() != record.sha256:
        raise UserError(f"{path / _RECORD} is damaged: its contents do not match its checksum")
    if record.config != config:
        raise _OtherConfig(
            f"{path} was written with another model, training or dataset configuration; "
            f"delete {path.parent} to train from the start"
        )
    tensors = load_tensors(path, record.dense)
    load_shards(model.embeddings, path / _EMBEDDINGS, with_optimizer=True)
    if model.dynamic is not None:
        load_dynamic(model.dynamic, path / _DYNAMIC, with_optimizer=True)
    model.load_state_dict(_below("model/", tensors))
    dense.load_state(_below("optimizer/", tensors))
    return record.progress


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
