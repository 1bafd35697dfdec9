"""The error with which a Python task of Spark has ended, from the text of its trace: only that reaches the driver."""

from __future__ import annotations

import builtins
import re
import sys
from importlib import import_module

from headrace.errors import UserError
from headrace.storage import StoreError

_BEGIN = re.compile(r"Traceback \(most recent call last\):\n|PythonException: (?=\w[\w.]*: )")
#: What Java says behind it.
_END = re.compile(r"\n\s*at [\w$.]+|\n\n(?:Driver stacktrace|JVM stacktrace):")
#: How Python joins the traces of errors that were raised one for another.
_FOR = "The above exception was the direct cause of the following exception"
_WHILE = "During handling of the above exception, another exception occurred"
_JOINED = re.compile(rf"\n\n({_FOR}|{_WHILE}):\n\n(?=Traceback )")
#: The lines of a trace before it are indented, but for the first.
_ERROR = re.compile(r"^(?!Traceback \(|\s)([\w.]+)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL)
_NUMBERED = re.compile(r"\[Errno (\d+)\] ([^\n]*?)(?:: '([^'\n]+)')?")


class TaskError(Exception):
    """An error of a task that is neither one of headrace's own nor about reading."""


def task_error(text: str) -> Exception | None:
    """The error of a Python task that a job has failed with; None: it has failed otherwise.

    It is of its own class, with its message, where that is one of headrace's (or of an operator's, derived from them)
    or an OSError; what it was raised for, or while it was handled, is its `__cause__` or `__context__`.

    Args:
        text: what Spark says, with the stack traces of Java and Python.
    """
    begin = _BEGIN.search(text)
    if begin is None:
        return None
    end = _END.search(text, begin.start())
    trace = text[begin.start() if "Traceback" in begin[0] else begin.end() : end.start() if end else None]
    error: Exception | None = None
    parts = _JOINED.split(trace)
    for joined, part in zip(("", *parts[1::2]), parts[::2], strict=True):
        found = _ERROR.search(part.strip("\n"))
        before, error = error, TaskError(part) if found is None else _made(found[1], (found[2] or "").strip())
        if joined == _FOR:
            error.__cause__ = before
        else:
            error.__context__ = before
    return error


def _made(name: str, message: str) -> Exception:
    """An error of that class, as far as it may be one that ends a program without its trace."""
    found = _class(name)
    if found is None:
        return TaskError(f"{name}: {message}")
    if issubclass(found, OSError) and (numbered := _NUMBERED.fullmatch(message)) is not None:
        return OSError(int(numbered[1]), numbered[2], numbered[3])
    # Those that are made of more than their message are told by a class above theirs.
    special = [i for i, c in enumerate(found.__mro__) if "__init__" in vars(c) and c.__module__ != "builtins"]
    made = found.__mro__[special[-1] + 1 if special else 0](message)
    assert isinstance(made, Exception)
    return made


def _class(name: str) -> type[Exception] | None:
    module, _, of = name.rpartition(".")
    if module.startswith("headrace."):
        import_module(module)
    found = getattr(sys.modules.get(module) if module else builtins, of, None)
    kinds = (UserError, StoreError, OSError)
    return found if isinstance(found, type) and issubclass(found, kinds) else None
