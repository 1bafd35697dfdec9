"""Writer of checkpoints: at once, or by a thread of each rank while training goes on.

In a store of objects they are always uploaded while training goes on: a rank writes its files to its host's disk, and a
thread uploads them. When all ranks are ready, a thread of the chief writes the record and then the list that publishes
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from headrace.comm.base import Collective
from headrace.embeddings.checkpoint.dynamic import save_dynamic
from headrace.embeddings.checkpoint.files import TOKEN, FileRecord, save_tensors, shared_directory, write_index
from headrace.embeddings.checkpoint.shards import save_shards
from headrace.embeddings.lookup.local_tables import bad_rows
from headrace.errors.stores import StoreError, free_in, is_full
from headrace.storage import Location, local
from headrace.storage.objects import copies
from headrace.train.callbacks.progress import LoopProgress
from headrace.train.checkpoint.read import (
    DENSE,
    DYNAMIC,
    EMBEDDINGS,
    RECORD,
    CheckpointedModel,
    CheckpointRecord,
    list_steps,
    step_name,
)
from headrace.train.job import Diverged
from headrace.train.optim import DenseOptimizer

T = TypeVar("T")
#: Number of a rank's files that are uploaded at the same time.
_UPLOADS = 4


class CheckpointWriter:
    """Writer of checkpoints `folder/step-NNNNNNNN`, at once or in the background. All methods are collective.

    In the background, `save` copies the state (which takes the memory of the rank's rows again) and returns, and a
    thread of each rank writes it. `poll`, called after each step, publishes it `lag` steps later; `finish` publishes it
    at once. A kill before that leaves the earlier checkpoints.

    In a store of objects `poll` does not wait: every `lag` steps it checks whether all ranks have uploaded. Only one
    checkpoint is being uploaded at a time; the next `save` waits for it.
    """

    def __init__(
        self,
        folder: Location,
        collective: Collective,
        *,
        config: str,
        keep: int,
        check_fence: Callable[[], None],
        token: str = "",
        background: bool = False,
        lag: int = 1,
    ) -> None:
        """Create a writer; see the class.

        Args:
            folder: folder of all checkpoints of a run.
            collective: the ranks, which share the file system or the store.
            config: fingerprint of the settings that must not change between a run and its continuation.
            keep: number of newest checkpoints to keep.
            check_fence: called by the chief before it empties a checkpoint's folder, before the rename, and before it
                removes others; raises if another launch has taken over.
            token: token of this launch. In a store of objects the folder of a checkpoint's files is named after it, so
                ranks of an earlier launch that still upload write to another one; empty: there are no such ranks.
            background: whether to write in the background.
            lag: number of steps, the same on all ranks.
        """
        self._folder, self._collective, self._config, self._keep = folder, collective, config, keep
        self._check_fence, self._background, self._lag = check_fence, background, lag
        self._uploads = folder.scheme != "file"
        self._token = token or TOKEN
        self._abandoned = threading.Event()
        self._pending: _Pending | None = None
        #: Seconds for which training waited for checkpoints.
        self.wait_seconds = 0.0

    def save(
        self, model: CheckpointedModel, dense: DenseOptimizer, progress: LoopProgress, keep_step: int | None = None
    ) -> None:
        """Finish the previous checkpoint, then begin that of `progress.step`. `keep_step` is not removed with old ones.

        Raises:
            Diverged: a number to save is NaN or infinite on some rank; all ranks raise it, and nothing is written.
        """
        with self._timed():
            self._save(model, dense, progress, keep_step)

    def _save(
        self, model: CheckpointedModel, dense: DenseOptimizer, progress: LoopProgress, keep_step: int | None
    ) -> None:
        self._finish()
        self._check_finite(model, dense, progress.step)
        if self._collective.world.is_chief:
            # Another launch may be writing to this step's folder.
            self._check_fence()
        final = self._folder / step_name(progress.step)
        tensors = {f"model/{k}": v for k, v in model.dense_state().items()}
        tensors |= {f"optimizer/{k}": v for k, v in dense.state().items()}
        embeddings, dynamic = model.embeddings, model.dynamic
        if self._background:
            embeddings = embeddings.snapshot()
            dynamic = None if dynamic is None else dynamic.snapshot()
            tensors = {k: v.clone() for k, v in tensors.items()}
        progress = progress.model_copy(deep=True)  # the loop continues to change its own
        stack = ExitStack()
        if self._uploads:
            if self._collective.world.is_chief:
                final.begin(self._token)
            self._collective.barrier()
            partial = final.building(self._token)
        else:
            partial = stack.enter_context(shared_directory(final, self._collective))

        def write(folder: Location) -> FileRecord | None:
            save_shards(embeddings, folder / EMBEDDINGS, with_optimizer=True)
            if dynamic is not None:
                save_dynamic(dynamic, folder / DYNAMIC)
            return save_tensors(folder / DENSE, tensors) if self._collective.world.is_chief else None

        if self._uploads:
            work = self._uploading(write, partial, progress.step)
        else:
            work = _Work(lambda: write(partial), self._background)
        self._pending = _Pending(final, stack, partial, progress, keep_step, work, progress.step + self._lag)
        if not (self._background or self._uploads):
            self._finish()

    def _uploading(
        self, write: Callable[[Location], FileRecord | None], partial: Location, step: int
    ) -> _Work[FileRecord | None]:
        """Write a rank's files to this host's disk, now or in the background; in the background upload them."""
        place = copies.new_path("checkpoint")
        stage = local(place).transient()

        def upload(written: FileRecord | None) -> FileRecord | None:
            def send(file: Location) -> None:
                if self._abandoned.is_set():
                    raise Abandoned
                with (partial / file.below(stage)).new_file() as path:
                    file.move_to(local(path))

            try:
                with ThreadPoolExecutor(_UPLOADS, "upload") as pool:
                    list(pool.map(send, list(stage.files())))
            finally:
                copies.drop(place)
            return written

        # The list is emptied by the call, so that the copied rows are freed during the upload.
        calls = [write]

        def write_here() -> FileRecord | None:
            try:
                return calls.pop()(stage)
            except BaseException:
                copies.drop(place)
                raise

        if self._background:
            return _Work(lambda: upload(write_here()), True)
        try:
            written = write_here()
        except OSError as e:
            raise self._unwritten(e, step, local(copies.folder())) from e
        return _Work(lambda: upload(written), True)

    def _check_finite(self, model: CheckpointedModel, dense: DenseOptimizer, step: int) -> None:
        """Raise Diverged, on all ranks, if a number to save is NaN or infinite on one of them."""
        bad = [f"table '{t}'" for t in bad_rows(model.embeddings)]
        tensors = {**model.dense_state(), **{f"optimizer state {k}": v for k, v in dense.state().items()}}
        bad += [f"'{name}'" for name, x in tensors.items() if x.is_floating_point() and not bool(x.sum().isfinite())]
        bad_count = torch.tensor([float(len(bad))])
        self._collective.all_reduce_sum([bad_count])
        if float(bad_count):
            places = ", ".join(bad) or "a table of another rank"
            raise Diverged(f"training diverged: {places} holds NaN or infinite numbers after step {step}", step)

    def poll(self, step: int) -> None:
        """Finish the checkpoint of `lag` steps ago; in a store of objects only if all ranks have uploaded it."""
        pending = self._pending
        if pending is None or step < pending.due:
            return
        with self._timed():
            if not self._uploads:
                self._finish()
                return
            pending.due = step + self._lag
            if pending.publication is None:
                self._publish_if_uploaded(pending)
            elif pending.publication.is_done:
                pending.publication.result()

    def abandon(self) -> None:
        """Upload no further file, because this rank ends by an error. Unfinished uploads stay invisible.

        Otherwise the ending process would wait for uploads of a checkpoint that other ranks do not complete.
        """
        self._abandoned.set()

    def finish(self) -> None:
        """Wait for the begun checkpoint and publish it; then remove all but the newest ones.

        Raises:
            OSError: this rank could not write. Other errors of the write are raised too.
        """
        with self._timed():
            self._finish()

    def _finish(self) -> None:
        pending = self._pending
        if pending is None:
            return
        if self._uploads:
            if pending.publication is None:
                pending.work.wait()
                self._publish_if_uploaded(pending)
            if pending.publication is not None:
                pending.publication.result()
            self._collective.barrier()
            self._pending = None
            return
        self._pending = None
        with pending.stack:
            try:
                written = pending.work.result()
            except OSError as e:
                raise self._unwritten(e, pending.progress.step, self._folder) from e
            self._collective.barrier()
            self._complete(pending, written)
        self._remove_older(pending)

    def _publish_if_uploaded(self, pending: _Pending) -> None:
        """Let the chief's thread publish if all ranks have uploaded. Collective.

        Raises:
            OSError: this rank could not upload. Other ranks continue until they notice that it is missing.
        """
        votes = torch.tensor([float(pending.work.is_done and not pending.work.has_failed)])
        self._collective.all_reduce_sum([votes])
        if pending.work.has_failed:
            try:
                pending.work.result()
            except OSError as e:
                raise self._unwritten(e, pending.progress.step, local(copies.folder())) from e
        if int(votes) < self._collective.world.size:
            return
        written = pending.work.result()

        def publish() -> None:
            if self._collective.world.is_chief:
                self._complete(pending, written)
                pending.final.commit(self._token)
                self._remove_older(pending)

        pending.publication = _Work(publish, True)

    def _complete(self, pending: _Pending, written: FileRecord | None) -> None:
        """Write the chief's last files, after all ranks have written theirs."""
        if written is None:
            return
        write_index(pending.partial / EMBEDDINGS)
        record = CheckpointRecord(config=self._config, progress=pending.progress, dense=written)
        record = record.model_copy(update={"sha256": record.digest()})
        (pending.partial / RECORD).put_text(record.model_dump_json() + "\n")
        self._check_fence()

    def _remove_older(self, pending: _Pending) -> None:
        if not self._collective.world.is_chief:
            return
        # A launch that was cut off while it wrote its list may come back after a later one has resumed from that step.
        self._check_fence()
        step, steps = pending.progress.step, list_steps(self._folder)
        # Checkpoints of later steps were refused as damaged when the run resumed, so they do not count.
        retained = {*[s for s in steps if s <= step][: self._keep], pending.keep_step}
        for older in steps:
            if older not in retained:
                (self._folder / step_name(older)).remove()

    def _unwritten(self, e: OSError, step: int, folder: Location) -> OSError:
        """Return the error to raise for `e`; `folder`: folder of the files, or of their copies before an upload."""
        message = f"the checkpoint of step {step} could not be written"
        if isinstance(e, StoreError):
            return type(e)(f"{message} ({e})")
        room = f"; {free_in(Path(folder.path))}" if folder.scheme == "file" else ""
        # Errors of writes to an open file have no filename. The message about a full disk names the folder.
        filename = None if is_full(e) else e.filename or str(folder)
        return CheckpointUnwritten(e.errno, f"{message} ({e.strerror or e}{room})", filename)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - start


class CheckpointUnwritten(OSError):
    """An error of a checkpoint's file; its message has the step and the free space."""


class Abandoned(Exception):
    """The rank ends before it has uploaded a checkpoint."""


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    final: Location
    stack: ExitStack
    partial: Location
    progress: LoopProgress
    keep_step: int | None
    work: _Work[FileRecord | None]
    #: Step of the next check.
    due: int
    #: Publication of the uploaded files by the chief; None before it.
    publication: _Work[None] | None = None


class _Work(Generic[T]):
    """A call, at once or in a thread, whose result or error is read later. Its arguments are freed after it has run."""

    def __init__(self, call: Callable[[], T], background: bool) -> None:
        self._calls = [call]
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if background else None
        if self._thread is None:
            self._run()
        else:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._calls.pop()())
        except BaseException as e:
            self._error = e

    @property
    def is_done(self) -> bool:
        return self._error is not None or bool(self._results)

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Wait for the end of the call."""
        if self._thread is not None:
            self._thread.join()

    def result(self) -> T:
        """Wait for the call, then return its result or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
