"""Progress of the work in this process, for listeners such as `headrace status --watch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Units done, of how many."""

    done: int
    total: int
    #: The unit of `done` and `total`: steps, rows, tasks.
    unit: str
    #: Units a second; 0: unknown.
    rate: float = 0.0
    #: None: unknown.
    seconds_left: float | None = None


Listener = Callable[[Progress], None]
_listeners: list[Listener] = []


def tell(progress: Progress) -> None:
    """Send progress to the listeners of this process, if there are any."""
    for listener in tuple(_listeners):
        listener(progress)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with each progress that is sent within the block, in the sender's thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
