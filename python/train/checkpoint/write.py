"""Checkpoints are written: now, or by a thread of each rank while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from headrace.comm.base import Collective
from headrace.embeddings.checkpoint.dynamic import save_dynamic
from headrace.embeddings.checkpoint.index import write_index
from headrace.embeddings.checkpoint.shards import save_shards
from headrace.embeddings.checkpoint.shared_directory import shared_directory
from headrace.embeddings.checkpoint.tensors import FileRecord, save_tensors
from headrace.embeddings.lookup.finite import bad_rows
from headrace.storage import Location
from headrace.train.checkpoint.folders import list_steps, step_name
from headrace.train.checkpoint.progress import Progress
from headrace.train.checkpoint.record import DENSE, DYNAMIC, EMBEDDINGS, RECORD, CheckpointRecord, Model
from headrace.train.optim.dense import DenseOptimizer
from headrace.train.result import Diverged


class CheckpointWriter:
    """Writes checkpoints `folder/step-NNNNNNNN`, now or while training goes on. All its methods are collective.

    In the background, `save` copies what is to be written (a second time the memory of the rank's rows) and returns; a
    thread of each rank writes it; `poll`, called after each step, makes it visible `lag` steps later, or `finish` at
    once. Between, a kill leaves the checkpoints there were.
    """

    def __init__(
        self,
        folder: Location,
        collective: Collective,
        *,
        config: str,
        keep: int,
        check_fence: Callable[[], None],
        background: bool = False,
        lag: int = 1,
    ) -> None:
        """See the class.

        Args:
            folder: of all checkpoints of a run.
            collective: the ranks; they share the file system.
            config: fingerprint of what must not change between a run and its continuation.
            keep: the newest so many stay.
            check_fence: called by the chief before the rename; raises where another launch has taken over.
            background: see the class.
            lag: steps, the same on all ranks.
        """
        self._folder, self._collective, self._config, self._keep = folder, collective, config, keep
        self._check_fence, self._background, self._lag = check_fence, background, lag
        self._pending: _Pending | None = None

    def save(self, model: Model, dense: DenseOptimizer, progress: Progress, keep_step: int | None = None) -> None:
        """Begin the checkpoint of `progress.step`, after finishing the one before. `keep_step` outlives the others.

        Raises:
            Diverged: what would be saved is NaN or infinite somewhere; all ranks raise it, and nothing is written.
        """
        self.finish()
        self._check_finite(model, dense, progress.step)
        final = self._folder / step_name(progress.step)
        tensors = {f"model/{k}": v for k, v in model.dense_state().items()}
        tensors |= {f"optimizer/{k}": v for k, v in dense.state().items()}
        embeddings, dynamic = model.embeddings, model.dynamic
        if self._background:
            embeddings, progress = embeddings.snapshot(), progress.model_copy(deep=True)
            dynamic = None if dynamic is None else dynamic.snapshot()
            tensors = {k: v.clone() for k, v in tensors.items()}
        stack = ExitStack()
        partial = stack.enter_context(shared_directory(final, self._collective))

        def write() -> FileRecord | None:
            save_shards(embeddings, partial / EMBEDDINGS, with_optimizer=True)
            if dynamic is not None:
                save_dynamic(dynamic, partial / DYNAMIC)
            return save_tensors(partial / DENSE, tensors) if self._collective.world.is_chief else None

        self._pending = _Pending(stack, partial, progress, keep_step, _Write(write, self._background))
        if not self._background:
            self.finish()

    def _check_finite(self, model: Model, dense: DenseOptimizer, step: int) -> None:
        """Raise Diverged, on all ranks, where a number that would be saved is NaN or infinite on one of them."""
        bad = [f"table '{t}'" for t in bad_rows(model.embeddings)]
        tensors = {**model.dense_state(), **{f"optimizer state {k}": v for k, v in dense.state().items()}}
        bad += [f"'{name}'" for name, x in tensors.items() if x.is_floating_point() and not bool(x.sum().isfinite())]
        found = torch.tensor([float(len(bad))])
        self._collective.all_reduce_sum([found])
        if float(found):
            here = ", ".join(bad) or "a table of another rank"
            raise Diverged(f"training diverged: {here} holds NaN or infinite numbers after step {step}", step)

    def poll(self, step: int) -> None:
        """Finish what was begun `lag` steps ago."""
        if self._pending is not None and step >= self._pending.progress.step + self._lag:
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun, and make it visible; then remove all but the newest up to it.

        Raises:
            OSError: this rank could not write (and whatever else stopped it).
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with pending.stack:
            try:
                written = pending.work.result()
            except OSError as e:
                free = self._folder.free()
                room = "" if free is None else f"; {free / 2**30:.1f} GiB free in {self._folder}"
                raise OSError(
                    e.errno, f"the checkpoint of step {pending.progress.step} could not be written ({e.strerror}{room})"
                ) from e
            self._collective.barrier()
            if written is not None:
                write_index(pending.partial / EMBEDDINGS)
                record = CheckpointRecord(config=self._config, progress=pending.progress, dense=written)
                record = record.model_copy(update={"sha256": record.digest()})
                (pending.partial / RECORD).put_text(record.model_dump_json() + "\n")
                self._check_fence()
        if self._collective.world.is_chief:
            step, steps = pending.progress.step, list_steps(self._folder)
            # Those of later steps were refused when the run resumed: they are damaged, and count for nothing.
            kept = {*[s for s in steps if s <= step][: self._keep], pending.keep_step}
            for other in steps:
                if other not in kept:
                    (self._folder / step_name(other)).remove()


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    stack: ExitStack
    partial: Location
    progress: Progress
    keep_step: int | None
    work: _Write


class _Write:
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
