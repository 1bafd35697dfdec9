"""How far the work of this process is, for whoever listens: `headrace status --watch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """So much of so much."""

    done: int
    total: int
    #: What is counted: steps, rows, tasks.
    unit: str
    #: Units a second; 0: not known.
    rate: float = 0.0
    #: None: not known.
    seconds_left: float | None = None


Listener = Callable[[Progress], None]
_listeners: list[Listener] = []


def tell(progress: Progress) -> None:
    """Tell those who listen in this process; nobody may."""
    for listener in tuple(_listeners):
        listener(progress)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within, `listener` hears of progress, in the thread that tells it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
