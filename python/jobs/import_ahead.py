"""Imports of later stages, beside the work of the first: an application mostly waits for its JVM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from headrace.stages import STAGES

log = logging.getLogger("headrace.jobs")


@contextmanager
def import_ahead(stages: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Give a function that starts a thread, which imports `StageEntry.imports` in the order of the stages.

    What goes wrong is left to the stage, which imports it again. At the end the thread stops behind the module that it
    is in.

    Yields:
        what to call when the imports may begin.
    """
    over = threading.Event()

    def work() -> None:
        for name in stages:
            for imported in STAGES[name].imports:
                if over.is_set():
                    return
                try:
                    _load(imported)
                except Exception as e:  # an import can fail with anything
                    log.debug("%s cannot be imported yet: %s", imported, e)

    # Not a daemon: an interpreter that ends in the middle of a library's initialisation may crash.
    thread = threading.Thread(target=work, name="import-ahead")
    begun = False

    def begin() -> None:
        nonlocal begun
        if not begun:
            begun = True
            thread.start()

    try:
        yield begin
    finally:
        over.set()
        if begun:
            thread.join()


def _load(name: str) -> None:
    module, _, function = name.partition(":")
    imported = import_module(module)
    if function:
        getattr(imported, function)()
