"""Checkpoints are written: now, or by a thread of each rank while training goes on.

In a store of objects they always go up while training goes on: a rank writes its files to its host's disk, and a thread
uploads them. When all ranks have, a thread of the chief writes the record and, last, the list that publishes them.
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
from headrace.errors.files import free_in, is_full
from headrace.errors.stores import StoreError
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
#: Files of a rank that are uploaded at once.
_UPLOADS = 4


class CheckpointWriter:
    """Writes checkpoints `folder/step-NNNNNNNN`, now or while training goes on. All its methods are collective.

    In the background, `save` copies what is to be written (a second time the memory of the rank's rows) and returns; a
    thread of each rank writes it; `poll`, called after each step, makes it visible `lag` steps later, or `finish` at
    once. Between, a kill leaves the checkpoints there were.

    In a store of objects `poll` waits for nothing: each `lag` steps it asks whether all ranks have uploaded. One
    checkpoint is on its way at a time; the next `save` waits for it.
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
        """See the class.

        Args:
            folder: of all checkpoints of a run.
            collective: the ranks; they share the file system, or the store.
            config: fingerprint of what must not change between a run and its continuation.
            keep: the newest so many stay.
            check_fence: called by the chief before it empties a checkpoint's place, before the rename, and before it
                removes others; raises where another launch has taken over.
            token: of this launch. In a store of objects it names the place of a checkpoint's files, so that ranks that
                an earlier launch left behind, and that go on uploading, write none of this one's; empty: there are
                no such ranks.
            background: see the class.
            lag: steps, the same on all ranks.
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
        """Begin the checkpoint of `progress.step`, after finishing the one before. `keep_step` outlives the others.

        Raises:
            Diverged: what would be saved is NaN or infinite somewhere; all ranks raise it, and nothing is written.
        """
        with self._timed():
            self._save(model, dense, progress, keep_step)

    def _save(
        self, model: CheckpointedModel, dense: DenseOptimizer, progress: LoopProgress, keep_step: int | None
    ) -> None:
        self._finish()
        self._check_finite(model, dense, progress.step)
        if self._collective.world.is_chief:
            # The place of this step may be the one that the other launch is filling.
            self._check_fence()
        final = self._folder / step_name(progress.step)
        tensors = {f"model/{k}": v for k, v in model.dense_state().items()}
        tensors |= {f"optimizer/{k}": v for k, v in dense.state().items()}
        embeddings, dynamic = model.embeddings, model.dynamic
        if self._background:
            embeddings = embeddings.snapshot()
            dynamic = None if dynamic is None else dynamic.snapshot()
            tensors = {k: v.clone() for k, v in tensors.items()}
        progress = progress.model_copy(deep=True)  # the loop's goes on
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

        # Taken out when it is called: while files go up, the copied rows need not stay.
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
        """Raise Diverged, on all ranks, where a number that would be saved is NaN or infinite on one of them."""
        bad = [f"table '{t}'" for t in bad_rows(model.embeddings)]
        tensors = {**model.dense_state(), **{f"optimizer state {k}": v for k, v in dense.state().items()}}
        bad += [f"'{name}'" for name, x in tensors.items() if x.is_floating_point() and not bool(x.sum().isfinite())]
        bad_count = torch.tensor([float(len(bad))])
        self._collective.all_reduce_sum([bad_count])
        if float(bad_count):
            places = ", ".join(bad) or "a table of another rank"
            raise Diverged(f"training diverged: {places} holds NaN or infinite numbers after step {step}", step)

    def poll(self, step: int) -> None:
        """Finish what was begun `lag` steps ago; in a store of objects, what all ranks have uploaded since."""
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

        A process waits for such threads when it ends, and a checkpoint that lacks what other ranks no longer write is
        not worth the time.
        """
        self._abandoned.set()

    def finish(self) -> None:
        """Wait for what was begun, and make it visible; then remove all but the newest up to it.

        Raises:
            OSError: this rank could not write (and whatever else stopped it).
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
            OSError: this rank could not upload. The others go on until they miss it.
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
        """Write the chief's last files, when all ranks have written theirs."""
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
        # A launch that was cut off while its list was put may come back when a later one has gone on from that step.
        self._check_fence()
        step, steps = pending.progress.step, list_steps(self._folder)
        # Those of later steps were refused when the run resumed: they are damaged, and count for nothing.
        retained = {*[s for s in steps if s <= step][: self._keep], pending.keep_step}
        for older in steps:
            if older not in retained:
                (self._folder / step_name(older)).remove()

    def _unwritten(self, e: OSError, step: int, folder: Location) -> OSError:
        """Return the error to raise for `e`; `folder`: the target of the files, or of their copies on the way to a
        store.
        """
        message = f"the checkpoint of step {step} could not be written"
        if isinstance(e, StoreError):
            return type(e)(f"{message} ({e})")
        room = f"; {free_in(Path(folder.path))}" if folder.scheme == "file" else ""
        # Writes to an open file name none; of a full disk the message names the folder.
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
    """An error of a file of a checkpoint, with the step and the room that there is in its message."""


class Abandoned(Exception):
    """The rank that was to upload a checkpoint ends."""


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    final: Location
    stack: ExitStack
    partial: Location
    progress: LoopProgress
    keep_step: int | None
    work: _Work[FileRecord | None]
    #: The step at which it is looked at again.
    due: int
    #: Of what is uploaded.
    publication: _Work[None] | None = None


class _Work(Generic[T]):
    """A call, now or in a thread; its result, or its error, is had later. What it holds on to goes when it has run."""

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
        """Wait until it is done."""
        if self._thread is not None:
            self._thread.join()

    def result(self) -> T:
        """Wait for the call, then return its result or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
