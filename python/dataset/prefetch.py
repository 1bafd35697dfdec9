"""Work ahead in one thread, with the waiting counted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.1


class _End:
    pass


class Prefetch(Generic[T]):
    """Iterate over `items`, produced in a background thread at most `depth` ahead.

    An error of the producer is raised where the consumer asks for the next item. `close()` ends the thread; it also
    ends with the process, being a daemon.
    """

    def __init__(self, items: Iterator[T], depth: int = 4) -> None:
        self._items = items
        self._queue: queue.Queue[T | BaseException | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        #: Seconds for which the consumer waited for an item.
        self.wait_seconds = 0.0
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        tick = time.perf_counter()
        found = self._queue.get()
        self.wait_seconds += time.perf_counter() - tick
        if isinstance(found, (_End, BaseException)):
            self._queue.put(found)  # for whoever asks again
            raise StopIteration if isinstance(found, _End) else found
        return found

    def close(self) -> None:
        """Stop the producer and wait for it."""
        self._closed.set()
        self._thread.join()

    def _produce(self) -> None:
        last: BaseException | _End = _End()
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as e:
            last = e
        self._put(last)

    def _put(self, item: T | BaseException | _End) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False
