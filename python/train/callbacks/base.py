"""Hooks of the training loop: a `Callback` observes a run without code in the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepEnd:
    """Figures of a completed step."""

    #: Number of the step, from 1, over all epochs.
    step: int
    #: Number of the epoch, from 1.
    epoch: int
    #: Mean loss over the rows of the global batch, before the step.
    loss: float
    #: `dense_rate` and `embeddings_rate`.
    learning_rates: Mapping[str, float]


class Callback:
    """Hooks that do nothing unless they are overridden. All ranks call the same hooks in the same order.

    Phases nest: `step` holds `data`, `lookup`, `dense forward`, `dense backward` and `optimizer`; `evaluate` and
    `checkpoint` come between steps.
    """

    def on_phase_start(self, phase: str) -> None: ...

    def on_phase_end(self, phase: str) -> None: ...

    def on_step_end(self, step: StepEnd) -> None:
        """Receive a step: called inside the phase `step`, before an evaluation or a checkpoint."""

    def on_evaluation_end(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        """Receive an evaluation: called after the phase `evaluate`."""


class CallbackList(Callback):
    """Several callbacks as one; phases end in the reverse of the order in which they start."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase for the length of a block."""
        self.on_phase_start(name)
        try:
            yield
        finally:
            self.on_phase_end(name)

    def on_phase_start(self, phase: str) -> None:
        for callback in self._callbacks:
            callback.on_phase_start(phase)

    def on_phase_end(self, phase: str) -> None:
        for callback in reversed(self._callbacks):
            callback.on_phase_end(phase)

    def on_step_end(self, step: StepEnd) -> None:
        for callback in self._callbacks:
            callback.on_step_end(step)

    def on_evaluation_end(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        for callback in self._callbacks:
            callback.on_evaluation_end(step, epoch, metrics)
