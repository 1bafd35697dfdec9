"""Where a step's time goes: spans that nest, each second counted once.

A span's own time is its length without the spans inside it, so the parts of a step add up to the step. Names are those
of `PARTS`; `step` is the outermost, and its own time is the loop's bookkeeping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.train.callbacks.base import Callback

T = TypeVar("T")

#: What a step is made of, in the order of the table. `lookup` is the embeddings' work of both directions on this rank:
#: sorting out ids, reading rows, pooling, summing gradients; `exchange` all waiting for messages, the dense gradients'
#: among them; `loop` what is left: bookkeeping, metrics.
PARTS = ("data", "lookup", "exchange", "dense forward", "dense backward", "optimizer", "loop")
#: Steps whose spans are kept for the trace, after as many as the first that are left out: allocators warm up.
TRACED_STEPS = 20
_WARM_UP = 3
OUTSIDE = -1


@dataclass(frozen=True)
class Event:
    """A span as it was: seconds by `time.perf_counter`, the thread, and the step (from 0) or OUTSIDE of any."""

    name: str
    start: float
    end: float
    thread: str
    step: int


class Tracer(Callback):
    """What this rank's threads were doing. The loop's thread nests spans; others add whole ones.

    A phase of the loop is a span.
    """

    def __init__(self) -> None:
        #: Own seconds by part, of whole steps.
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self.events: list[Event] = []
        self._open: list[list[Any]] = []  # name, start, seconds of the spans inside
        self._own: dict[str, float] = {}
        self._thread = threading.get_ident()
        #: Added to `perf_counter` seconds: seconds since the epoch, which ranks of other machines share.
        self.epoch = time.time() - time.perf_counter()

    def on_phase_start(self, phase: str) -> None:
        self.enter(phase)

    def on_phase_end(self, phase: str) -> None:
        self.leave()

    def enter(self, name: str) -> None:
        """Begin a span inside those that are open."""
        if threading.get_ident() == self._thread:
            self._open.append([name, time.perf_counter(), 0.0])

    def leave(self) -> None:
        """End the innermost span."""
        if threading.get_ident() != self._thread:
            return
        end = time.perf_counter()
        in_step = self._open[0][0] == "step"  # an evaluation looks up, too
        name, start, inside = self._open.pop()
        if self._open:
            self._open[-1][2] += end - start
        if in_step:
            self._own[name] = self._own.get(name, 0.0) + end - start - inside
        self._keep(Event(name, start, end, "loop", self.steps if in_step else OUTSIDE))
        if name == "step":
            self._close_step()

    def _close_step(self) -> None:
        self.steps += 1
        if self.steps > _WARM_UP:
            for name, own in self._own.items():
                part = "loop" if name == "step" else name
                if part in self.seconds:
                    self.seconds[part] += own
        self._own = {}

    @property
    def counted(self) -> int:
        """Steps that `seconds` is the sum of."""
        return max(0, self.steps - _WARM_UP)

    def _keep(self, event: Event) -> None:
        if _WARM_UP <= self.steps < _WARM_UP + TRACED_STEPS:
            self.events.append(event)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A span for the length of a block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The same items; the time that each takes to come is a span of the thread that asks."""
        while True:
            start = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self._keep(Event(name, start, time.perf_counter(), threading.current_thread().name, self.steps))
            yield item

    def attach(self, embeddings: nn.Module) -> None:
        """Note the lookups of a module, forward and backward."""
        embeddings.register_forward_pre_hook(lambda module, args: self.enter("lookup"))
        embeddings.register_forward_hook(self._after_lookup)

    def _after_lookup(self, module: nn.Module, args: Any, out: Any) -> None:
        self.leave()
        if isinstance(out, ZeroCopyVectors):
            out.span = lambda: self.span("lookup")
            return
        node = out.grad_fn
        # The output may be a view of what the lookup's own function returned.
        while node is not None and "Lookup" not in node.name():
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.register_prehook(lambda grads: self.enter("lookup"))
            node.register_hook(lambda inputs, outputs: self.leave())


class NoOpTracer(Tracer):
    """Notes nothing."""

    def enter(self, name: str) -> None:
        return None

    def leave(self) -> None:
        return None

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        return items

    def attach(self, embeddings: nn.Module) -> None:
        return None
