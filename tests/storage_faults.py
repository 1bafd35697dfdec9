"""The n-th call by which the local store changes the disk fails, or is the last one of a killed process."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.storage import system

_CALLS = [
    name
    for name, f in inspect.getmembers(system, inspect.isfunction)
    if f.__module__ == system.__name__ and not name.startswith("_")
]


class Killed(BaseException):
    """The process is gone."""


class Faulty:
    """Stands between the store and the system: the n-th call fails, or it and all later ones do, as after a kill."""

    def __init__(self, at: int, kills: bool) -> None:
        self.at, self.kills, self.made = at, kills, 0

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.made += 1
            if self.made == self.at:
                _half(name, *arguments)
                raise Killed if self.kills else OSError(errno.ENOSPC, "no room")
            if self.made > self.at and self.kills:
                raise Killed
            return real(*arguments)

        return call


def _half(name: str, *arguments: Any) -> None:
    """What a call has done when it fails half-way."""
    if name == "write":
        arguments[0].write_bytes(bytes(arguments[1])[: len(arguments[1]) // 2])
    if name == "remove_tree":
        files = sorted(p for p in arguments[0].rglob("*") if p.is_file())
        for file in files[: len(files) // 2]:
            file.unlink()


@contextmanager
def faulty(at: int, kills: bool) -> Iterator[Faulty]:
    fault = Faulty(at, kills)
    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(system, name, fault.wrap(name, getattr(system, name)))
        yield fault
