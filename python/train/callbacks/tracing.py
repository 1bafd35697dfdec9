"""Time of a step by part: nested spans, with each second counted once; waits of collectives; profile mode.

A span's own time is its length without the spans inside it, so the parts of a step add up to the step. Spans have the
names of `PARTS`; `step` is the outermost one, and its own time is the loop's bookkeeping.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headrace.comm import World
from headrace.comm.base import (
    AllToAll,
    Collective,
    Message,
    MessageChannel,
    ReceivedMessage,
    channel_of,
    subgroup_all_to_all,
)
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.storage import Location
from headrace.train.callbacks.base import Callback
from headrace.train.callbacks.watchdog import Watchdog
from headrace.train.job import Job

T = TypeVar("T")

#: Parts of a step, in the order of the table. `lookup`: work on embeddings in both directions on this rank (sorting
#: ids, reading rows, pooling, summing gradients); `exchange`: all waits for messages, including dense gradients;
#: `loop`: the rest (bookkeeping, metrics).
PARTS = ("data", "lookup", "exchange", "dense forward", "dense backward", "optimizer", "loop")
#: Number of steps in the trace, after equally many that are left out while allocators warm up.
TRACED_STEPS = 20
_WARM_UP = 3
OUTSIDE = -1


@dataclass(frozen=True)
class Event:
    """A completed span: seconds by `time.perf_counter`, the thread, and the step (from 0), or OUTSIDE of steps."""

    name: str
    start: float
    end: float
    thread: str
    step: int


class Tracer(Callback):
    """Recorder of this rank's spans. The loop's thread nests them; other threads add completed ones.

    Each phase of the loop is a span.
    """

    def __init__(self) -> None:
        #: Own seconds by part, summed over completed steps.
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self.events: list[Event] = []
        self._open: list[list[Any]] = []  # name, start, seconds of the spans inside
        self._own_seconds: dict[str, float] = {}
        self._thread = threading.get_ident()
        #: Offset from `perf_counter` to seconds since 1970, which ranks on other machines share.
        self.epoch = time.time() - time.perf_counter()

    def on_phase_start(self, phase: str) -> None:
        self.enter(phase)

    def on_phase_end(self, phase: str) -> None:
        self.leave()

    def enter(self, name: str) -> None:
        """Begin a span inside the open ones."""
        if threading.get_ident() == self._thread:
            self._open.append([name, time.perf_counter(), 0.0])

    def leave(self) -> None:
        """End the innermost span."""
        if threading.get_ident() != self._thread:
            return
        end = time.perf_counter()
        in_step = self._open[0][0] == "step"  # evaluations have lookups too
        name, start, inside = self._open.pop()
        if self._open:
            self._open[-1][2] += end - start
        if in_step:
            self._own_seconds[name] = self._own_seconds.get(name, 0.0) + end - start - inside
        self._keep(Event(name, start, end, "loop", self.steps if in_step else OUTSIDE))
        if name == "step":
            self._close_step()

    def _close_step(self) -> None:
        self.steps += 1
        if self.steps > _WARM_UP:
            for name, own_seconds in self._own_seconds.items():
                part = "loop" if name == "step" else name
                if part in self.seconds:
                    self.seconds[part] += own_seconds
        self._own_seconds = {}

    @property
    def counted(self) -> int:
        """Number of steps that `seconds` sums."""
        return max(0, self.steps - _WARM_UP)

    def _keep(self, event: Event) -> None:
        if _WARM_UP <= self.steps < _WARM_UP + TRACED_STEPS:
            self.events.append(event)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Open a span for the length of a block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the same items; the wait for each item is a span of the calling thread."""
        while True:
            start = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self._keep(Event(name, start, time.perf_counter(), threading.current_thread().name, self.steps))
            yield item

    def attach(self, embeddings: nn.Module) -> None:
        """Record the lookups of a module, forward and backward."""
        embeddings.register_forward_pre_hook(lambda module, args: self.enter("lookup"))
        embeddings.register_forward_hook(self._after_lookup)

    def _after_lookup(self, module: nn.Module, args: Any, out: Any) -> None:
        self.leave()
        if isinstance(out, ZeroCopyVectors):
            out.span = lambda: self.span("lookup")
            return
        node = out.grad_fn
        # The output may be a view of the result of the lookup's autograd function.
        while node is not None and "Lookup" not in node.name():
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            node.register_prehook(lambda grads: self.enter("lookup"))
            node.register_hook(lambda inputs, outputs: self.leave())


class NoOpTracer(Tracer):
    """Tracer that records nothing."""

    def enter(self, name: str) -> None:
        return None

    def leave(self) -> None:
        return None

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        return items

    def attach(self, embeddings: nn.Module) -> None:
        return None


def collect_profile(job: Job, tracer: Tracer, collective: Collective) -> dict[str, float]:
    """Write the trace, and return the mean milliseconds of a step by part, and of `step`, over steps and ranks.

    Collective. The ranks exchange parts of the trace by the run's folder, which all share.
    """
    steps = max(1, tracer.counted)
    local_times = torch.tensor([[1e3 * tracer.seconds[p] / steps for p in PARTS]], dtype=torch.float64)
    by_rank = collective.all_gather(local_times)
    part = job.folder / f".trace-{collective.world.rank}.partial"
    part.put_text(json.dumps(_events(tracer, collective.world.rank)))
    collective.barrier()
    if collective.world.is_chief:
        parts = [job.folder / f".trace-{r}.partial" for r in range(collective.world.size)]
        events = [e for p in parts for e in json.loads(p.read_text())]
        job.trace.put_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        for p in parts:
            p.remove()
    means = {p: round(float(ms), 3) for p, ms in zip(PARTS, by_rank.mean(0), strict=True)}
    return {**means, "step": round(float(by_rank.sum(1).mean()), 3)}


def _events(tracer: Tracer, rank: int) -> list[dict[str, Any]]:
    threads = ["loop", *sorted({e.thread for e in tracer.events} - {"loop"})]
    about = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}]
    about += [
        {"ph": "M", "pid": rank, "tid": i, "name": "thread_name", "args": {"name": name}}
        for i, name in enumerate(threads)
    ]
    return [
        *about,
        *(
            {
                "ph": "X",
                "pid": rank,
                "tid": threads.index(e.thread),
                "name": e.name,
                "cat": "train",
                "ts": round((tracer.epoch + e.start) * 1e6, 1),
                "dur": round((e.end - e.start) * 1e6, 1),
                "args": {"step": e.step},
            }
            for e in tracer.events
        ),
    ]


def show_profile(profile: dict[str, float], trace: Location) -> str:
    """Return the table as text for people."""
    step = profile["step"] or 1.0
    lines = [f"{name:<15} {ms:9.2f} ms {100 * ms / step:6.1f} %" for name, ms in profile.items() if name != "step"]
    return "\n".join(["a step, mean over ranks:", *lines, f"{'step':<15} {step:9.2f} ms  100.0 %", f"trace: {trace}"])


class InstrumentedCollective:
    """A Collective that records its waits: for the watchdog's deadline, and as spans `exchange`."""

    def __init__(self, inner: Collective, watchdog: Watchdog, tracer: Tracer) -> None:
        self._inner, self._watchdog, self._tracer = inner, watchdog, tracer

    @property
    def world(self) -> World:
        return self._inner.world

    @contextmanager
    def _waits(self, message: str) -> Iterator[None]:
        with self._tracer.span("exchange"), self._watchdog.waiting(message):
            yield

    def subgroup_all_to_all(self, ranks: Sequence[int]) -> AllToAll | None:
        """Return the wrapped collective's messages for `ranks`; see headrace.comm.base.subgroup_all_to_all."""
        subgroup = subgroup_all_to_all(self._inner, ranks)
        return None if subgroup is None else _InstrumentedAllToAll(subgroup, self._waits)

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        with self._waits("all_to_all"):
            return self._inner.all_to_all(x, send_rows)

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        return _InstrumentedAllToAll(self._inner, self._waits).start_all_to_all(x, send_rows)

    @property
    def channel(self) -> MessageChannel | None:
        """The wrapped collective's channel; see headrace.comm.base.channel_of."""
        return None if channel_of(self._inner) is None else self

    def reserve(self, send_rows: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Message:
        """Reserve a message; see headrace.comm.base.MessageChannel."""
        channel = channel_of(self._inner)
        assert channel is not None
        with self._waits("all_to_all"):
            return _InstrumentedMessage(channel.reserve(send_rows, shape, dtype), self._waits)

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        with self._waits("all_reduce_sum"):
            self._inner.all_reduce_sum(tensors)

    def all_gather(self, x: Tensor) -> Tensor:
        with self._waits("all_gather"):
            return self._inner.all_gather(x)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        with self._waits("broadcast"):
            self._inner.broadcast(tensors, root)

    def barrier(self) -> None:
        with self._waits("barrier"):
            self._inner.barrier()


class _InstrumentedAllToAll:
    """All-to-all of a subgroup that records its waits."""

    def __init__(self, inner: AllToAll, waits: Callable[[str], AbstractContextManager[None]]) -> None:
        self._inner, self._waits = inner, waits

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        with self._waits("all_to_all"):
            finish = self._inner.start_all_to_all(x, send_rows)

        def wait() -> tuple[Tensor, list[int]]:
            with self._waits("all_to_all"):
                return finish()

        return wait


class _InstrumentedMessage:
    """A message that records its wait."""

    def __init__(self, inner: Message, waits: Callable[[str], AbstractContextManager[None]]) -> None:
        self._inner, self._waits = inner, waits

    @property
    def parts(self) -> Sequence[Tensor | None]:
        return self._inner.parts

    def send(self) -> Callable[[], ReceivedMessage]:
        with self._waits("all_to_all"):
            finish = self._inner.send()

        def wait() -> ReceivedMessage:
            with self._waits("all_to_all"):
                return finish()

        return wait
