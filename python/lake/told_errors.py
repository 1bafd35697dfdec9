"""How an error that ends a program is told: in one message with an exit code, or, where nobody can say what to do about
it, by its trace."""

from __future__ import annotations

import sys

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.storage import StoreAway, StoreError
from headrace.storage.file_faults import told_of_file


def told(error: Exception) -> tuple[str, int] | None:
    """The message and the exit code of an error; None: it is to be shown with its trace.

    A store that is away is told as that, whatever has become of it on its way up: who cannot read a file mostly says
    that the file is damaged or missing, and Spark wraps what its tasks and its own file systems say.
    """
    is_other = isinstance(error, UserError) and error.exit_code != EXIT_USER_ERROR
    if not is_other and (away := store_away(error)) is not None:
        return str(away), EXIT_INCOMPLETE
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, StoreError):
        return f"{error}. Run this again; if it stays, see what is there (docs/storage.md)", EXIT_FAILURE
    fault = error if isinstance(error, OSError) else _file_error_of_task(error)
    return None if fault is None else told_of_file(fault)


def store_away(error: BaseException) -> StoreAway | None:
    """That a store is away, where an error comes of it: by what it was raised for, or, of an error that says that
    something cannot be read, while it was handled."""
    seen = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, StoreAway):
            return cause
        if "pyspark" in sys.modules:  # otherwise it is no error of Spark's
            from headrace.lake.spark_outages import store_away_of_spark

            if (away := store_away_of_spark(cause)) is not None:
                return away
        seen.append(cause)
        cause = cause.__cause__ or (cause.__context__ if _tells_of_reading(cause) else None)
    return None


def _file_error_of_task(error: BaseException) -> OSError | None:
    """The error of a file with which a Python task of Spark has ended; None: it has ended otherwise."""
    if "pyspark" not in sys.modules:
        return None
    from headrace.lake.spark_outages import file_error_of_spark

    return file_error_of_spark(error)


def _tells_of_reading(error: BaseException) -> bool:
    """Whether an error may say, in its own words, that something could not be read: another one, raised while a store
    was away, is a fault of the program that wants its trace."""
    kinds: tuple[type[BaseException], ...] = (UserError, OSError)
    if (arrow := sys.modules.get("pyarrow")) is not None:
        kinds += (arrow.ArrowException,)
    if (spark := sys.modules.get("pyspark.errors")) is not None:
        kinds += (spark.PySparkException, sys.modules["py4j.protocol"].Py4JJavaError)
    return isinstance(error, kinds)
