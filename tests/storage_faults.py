"""The n-th call by which a store changes a disk or a bucket fails, or is the last one of a killed process."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from headrace.storage import system


def _calls(module: ModuleType) -> list[str]:
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, f in functions if f.__module__ == module.__name__ and not name.startswith("_")]


class Killed(BaseException):
    """The process is gone."""


class Faulty:
    """Stands between the store and the system: the n-th call fails, or it and all later ones do, as after a kill."""

    def __init__(self, failing_call: int, kills: bool, done: bool = False) -> None:
        self.failing_call, self.kills, self.done, self.calls_made = failing_call, kills, done, 0

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls_made += 1
            if self.calls_made == self.failing_call:
                if self.done:
                    real(*arguments)
                else:
                    _half(name, *arguments)
                raise Killed if self.kills else OSError(errno.ENOSPC, "no room")
            if self.calls_made > self.failing_call and self.kills:
                raise Killed
            return real(*arguments)

        return call


def _half(name: str, *arguments: Any) -> None:
    """Do what a call has done when it fails half-way."""
    if name == "write":
        arguments[0].write_bytes(bytes(arguments[1])[: len(arguments[1]) // 2])
    if name == "remove_tree":
        files = sorted(p for p in arguments[0].rglob("*") if p.is_file())
        for file in files[: len(files) // 2]:
            file.unlink()


@contextmanager
def faulty(failing_call: int, kills: bool, calls: ModuleType = system, done: bool = False) -> Iterator[Faulty]:
    """Let the n-th of a module's calls fail within the context.

    Args:
        failing_call: n, from 1.
        kills: so do all that come after it.
        calls: the module: `headrace.storage.system`, or `headrace.storage.objects.calls`.
        done: the call does its work before it fails, as when its answer is lost.
    """
    fault = Faulty(failing_call, kills, done)
    with pytest.MonkeyPatch.context() as patch:
        for name in _calls(calls):
            patch.setattr(calls, name, fault.wrap(name, getattr(calls, name)))
        yield fault
