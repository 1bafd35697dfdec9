"""What is undone or removed at the end of a block, without hiding how the block ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.redaction import redact

log = logging.getLogger("headrace.publish")


@contextmanager
def cleaned_up(clean: Callable[[], object], left: str) -> Iterator[None]:
    """Call `clean` when the block ends, well or not.

    Where that fails the log says so, and the block ends as it would have: an error in it is the one that is seen, and
    what was done in it is done.

    Args:
        clean: it raises an error of its client library where it fails.
        left: what there is then, and who removes it, for people.
    """
    try:
        yield
    finally:
        try:
            clean()
        except Exception as e:  # each client library has errors of its own
            log.warning("%s (%s)", left, redact((str(e).splitlines() or [type(e).__name__])[0]))
