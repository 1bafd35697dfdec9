"""End of a program whose parent process has died."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_CHECK_SECONDS = 2.0


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call `act` once, on a thread of its own, when this process has another parent than now: its own has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_SECONDS)
        act()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
