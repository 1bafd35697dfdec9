"""What a Python task of Spark says to the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from headrace.errors import UserError


@contextmanager
def worker_errors() -> Iterator[None]:
    """A UserError of a task comes wrapped in Spark's own words: raise it as itself."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as e:
        found = re.search(r"headrace\.errors\.UserError: ([^\n]+)", str(e))
        if found is None:
            raise
        raise UserError(found[1]) from None
