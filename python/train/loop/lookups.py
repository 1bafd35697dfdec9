"""Embedding lookups one micro-batch ahead: ids travel while the dense part computes, rows where that pays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from headrace.models.sharded_model import PendingLookups, ShardedModel
from headrace.train.callbacks.base import CallbackList
from headrace.train.micro_batch import MicroBatch


def micro_batches(batches: Iterable[MicroBatch], parts: int) -> Iterator[MicroBatch]:
    """Each batch in `parts` consecutive slices of (nearly) as many rows."""
    for whole in batches:
        rows = len(whole.labels)
        for start, end in pairwise([rows * i // parts for i in range(parts + 1)]):
            yield whole.rows(start, end)


class LookupPipeline:
    """Micro-batches with their lookups begun, one ahead. Its methods are collective.

    Args:
        model: whose tables are looked up.
        batches: the micro-batches in order.
        callbacks: the phases `data` and `lookup`.
        spans_machines: whether the ranks are on several machines.
    """

    def __init__(
        self, model: ShardedModel, batches: Iterator[MicroBatch], callbacks: CallbackList, spans_machines: bool
    ) -> None:
        self._model, self._batches, self._callbacks, self._spans_machines = model, batches, callbacks, spans_machines
        self._ahead: tuple[MicroBatch, PendingLookups] | None = None

    def next(self, *, has_following: bool) -> tuple[MicroBatch, PendingLookups]:
        """The next micro-batch; the ids of the one after it are sent, where there is one."""
        current = self._ahead or self._begin()
        self._ahead = self._begin() if has_following else None
        return current

    def _begin(self) -> tuple[MicroBatch, PendingLookups]:
        """Take a micro-batch and send its ids to the owners of their rows, who answer while this rank computes."""
        with self._callbacks.phase("data"):
            batch = next(self._batches)
        with self._callbacks.phase("lookup"):
            return batch, self._model.prepare(batch.categorical)

    def fetch_rows(self, *, of_next_step: bool) -> None:
        """Ask for the rows of the micro-batch ahead: those of the next step only where this step leaves them alone.

        The latter only where a network's time can be hidden so: inside one machine, sorting rows into early and late
        ones takes more of the cores that compute than it saves.
        """
        if self._ahead is not None:
            if not of_next_step:
                self._ahead[1].start()
            elif self._spans_machines:
                self._ahead[1].prefetch()

    def drop(self) -> None:
        """Receive what was asked for and is not wanted any more: no message may be under way when ranks part."""
        if self._ahead is not None:
            self._ahead[1].drop()
            self._ahead = None
