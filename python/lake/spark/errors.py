"""How an error that ends a program is told: in one message with an exit code, or, where nobody can say what to do about
it, by its trace.

Spark wraps the errors of its Python tasks and of its file systems in its own. They are made headrace's own again in one
place, `own_error`, for all who ask: stages, by `headrace.lake.spark.session.session`, in which each of them uses Spark;
what ends a program (`told`); ranks of a training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.storage import StoreAway, StoreError
from headrace.storage.file_faults import DiskFull, disk_full, is_full, told_of_file
from headrace.storage.objects.calls import ChangedInPlace


def told(error: Exception, folders: Sequence[Path] = ()) -> tuple[str, int] | None:
    """The message and the exit code of an error; None: it is to be shown with its trace.

    `folders`: that the process writes to, one of which is named where a full disk is not (`disk_full`).
    """
    own = own_error(error, folders)
    if isinstance(own, StoreAway):
        return str(own), EXIT_INCOMPLETE
    if isinstance(own, StoreError):
        return f"{own}. Run this again; if it stays, see what is there (docs/storage.md)", EXIT_FAILURE
    if own is not None:
        return str(own), own.exit_code
    raised = _unwrapped(error)
    return told_of_file(raised) if isinstance(raised, OSError) else None


def own_error(error: BaseException, folders: Sequence[Path] = ()) -> UserError | StoreError | None:
    """An error as headrace's own: it is one, or a Python task of Spark has ended with one, or Spark's file system says
    of a store what one of headrace's does. None: nobody knows what to do about it.

    A store that is away, or a disk that is full, is told as that, whatever has become of it on its way up: who cannot
    read a file mostly says that the file is damaged or missing. `folders` as of `told`.
    """
    raised = _unwrapped(error)
    own = raised if isinstance(raised, (UserError, StoreError)) else None
    if isinstance(raised, ChangedInPlace):
        own = UserError(
            f"{raised}. Run this again; if it stays, delete the folder that the file is in, and run the stage again "
            f"that made it"
        )
    if isinstance(own, UserError) and own.exit_code != EXIT_USER_ERROR:
        return own
    return store_away(error) or full_disk(error, folders) or own


@contextmanager
def own_errors(folders: Sequence[Path] = ()) -> Iterator[None]:
    """Within, an error of Spark's that is one of headrace's own (`own_error`) is raised as that."""
    try:
        yield
    except Exception as e:
        if not _is_of_spark(e) or (own := own_error(e, folders)) is None:
            raise
        raise own from None


def store_away(error: BaseException) -> StoreAway | None:
    """That a store is away, or a file system of the network, where an error comes of it: by what it was raised for, or,
    of an error that says that something cannot be read, while it was handled."""
    for raised in _causes(error):
        if isinstance(raised, StoreAway):
            return raised
        if isinstance(raised, OSError) and not is_full(raised):
            found = told_of_file(raised)
            if found is not None and found[1] == EXIT_INCOMPLETE:
                return StoreAway(found[0])
    return None


def full_disk(error: BaseException, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the full disk that an error comes of, or None; `folders` as of `told`.

    Whatever is raised while a full disk is handled comes of it: writers that are closed then say many things.
    """
    for raised in _causes(error, all_contexts=True):
        if (found := raised if isinstance(raised, DiskFull) else disk_full(raised, folders)) is not None:
            return found
    return None


def _causes(error: BaseException, all_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and what it was raised for; of an error that something cannot be read (`all_contexts`: of any),
    also what was being handled when it was raised. Errors of Spark's are followed by those that they wrap."""
    seen = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        raised = _unwrapped(cause)
        yield raised
        if raised is not cause:
            yield from _causes(raised, all_contexts)
            yield cause
        cause = cause.__cause__ or (cause.__context__ if all_contexts or _tells_of_reading(cause) else None)


def _unwrapped(error: BaseException) -> BaseException:
    """What an error of Spark's says; else the error."""
    if not _is_of_spark(error):
        return error
    from headrace.lake.spark.messages import error_in_spark

    return error_in_spark(error) or error


def _is_of_spark(error: BaseException) -> bool:
    """Whether the JVM has raised it, or PySpark itself."""
    return isinstance(error, _kinds_of_spark())


def _kinds_of_spark() -> tuple[type[BaseException], ...]:
    if (spark := sys.modules.get("pyspark.errors")) is None:  # then it is none of them
        return ()
    return (spark.PySparkException, sys.modules["py4j.protocol"].Py4JJavaError)


def _tells_of_reading(error: BaseException) -> bool:
    """Whether an error may say, in its own words, that something could not be read: another one, raised while a store
    was away, is a fault of the program that wants its trace."""
    kinds: tuple[type[BaseException], ...] = (UserError, OSError, *_kinds_of_spark())
    if (arrow := sys.modules.get("pyarrow")) is not None:
        kinds += (arrow.ArrowException,)
    return isinstance(error, kinds)
