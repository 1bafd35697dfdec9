"""What a Python task of Spark says to the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from headrace.errors import UserError
from headrace.storage import StoreAway

_RAISED = re.compile(r"headrace\.(?:errors\.(UserError)|storage\.objects\.calls\.StoreAway): ([^\n]+)")


@contextmanager
def worker_errors() -> Iterator[None]:
    """A UserError or a StoreAway of a task comes wrapped in Spark's own words: raise it as itself."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as e:
        found = _RAISED.search(str(e))
        if found is None:
            raise
        raise (UserError if found[1] else StoreAway)(found[2]) from None
