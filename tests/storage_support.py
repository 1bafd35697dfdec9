"""One home for each kind of store, changes that tests make to a place, and stores whose calls fail."""

from __future__ import annotations

import errno
import inspect
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.collect import collect
from headrace.jobs.housekeeping.workspace_state import CleanupStep
from headrace.storage import Location, local, location, system
from headrace.storage.objects.store import ObjectStore
from headrace.storage.objects.tree import is_unfinished
from tests.hadoop_servers import Hdfs


def put_file(home: Location, text: str) -> None:
    (home / "thing").put_text(text * 100)


def put_folder(home: Location, text: str) -> None:
    with (home / "thing").new_folder() as folder:
        (folder / "a").put_text(text)
        (folder / "deep" / "b").put_text(text)
        (folder / f"only-{text}").put_text(text)
        with (folder / "c").new_file() as path:
            path.write_text(text)


def fill_by_two(home: Location, text: str) -> None:
    place = home / "thing"
    place.begin("shared")
    for name in ("a", "b"):
        (place.building("shared") / name).put_text(text)
    (place.building("shared") / f"only-{text}").put_text(text)
    place.commit("shared")


def seen(place: Location) -> Any:
    """All that a reader sees; None: nothing."""
    if place.is_dir():
        return {f.below(place): f.read_text() for f in place.files()}
    return place.read_text() if place.exists() else None


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


def memory_home(monkeypatch: pytest.MonkeyPatch, cache: Path, readers: tuple[str, ...] = ()) -> Location:
    """A place in a store of objects in memory.

    `readers`: further schemes that reach the same objects, each with what a process of its own would know.
    """
    memory = pytest.importorskip("obstore.store").MemoryStore()

    def open_bucket(scheme: str, bucket: str) -> Any:
        return memory

    for scheme in ("memory", *readers):
        monkeypatch.setitem(location.STORES, scheme, ObjectStore(scheme, open_bucket))
    monkeypatch.setenv("HEADRACE_CACHE", str(cache))
    return Location(PurePosixPath(f"/bucket/{uuid.uuid4().hex[:8]}"), "memory")


def hdfs_home(monkeypatch: pytest.MonkeyPatch, cache: Path, server: Hdfs, readers: tuple[str, ...] = ()) -> Location:
    """A place in HDFS. `readers`: as for `memory_home`."""
    from headrace_hdfs.store import HdfsStore

    for scheme in ("hdfs", *readers):
        monkeypatch.setitem(location.STORES, scheme, HdfsStore())
    monkeypatch.setenv("HEADRACE_CACHE", str(cache))
    return Location(PurePosixPath(f"/{server.url.removeprefix('hdfs://')}/{uuid.uuid4().hex[:8]}"), "hdfs")


def home_of(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    return local(tmp_path / "home") if kind == "local" else memory_home(monkeypatch, tmp_path / "cache")


def left_over(home: Location) -> list[str]:
    """Return the names of a home that no reader sees, by what the store itself says."""
    seen = {f.below(home) for f in home.files()}
    if home.scheme == "file":
        files = (p for p in home.local_path().rglob("*") if p.is_file())
        return sorted(str(p.relative_to(home.local_path())) for p in files if str(p.relative_to(home.path)) not in seen)
    store = location.STORES[home.scheme]
    assert isinstance(store, ObjectStore)
    tree, key = store._resolve(home.path)
    named = {stored.key for stored in tree.files(key).values()}
    from headrace.storage.objects import calls  # the calls as they are now: a test may have replaced them

    every = [o.key for o in calls.list_below(tree.bucket, key)]
    lists = {k for k in every if "/.headrace/lists/" in f"/{k}" and not any(map(is_unfinished, k.split("/")))}
    return sorted(k[len(key) + 1 :] for k in every if k not in named and k not in lists)


def clicks(**housekeeping: Any) -> Spec:
    """The shipped pipeline without a warehouse; files may go as soon as nothing names them."""
    keep = {"vacuum_hours": 0, "unfinished_days": 0, "compact_files": None} | housekeeping
    sets = [f"housekeeping.{key}={json.dumps(value)}" for key, value in keep.items()]
    return load_spec("clicks", ["publish=null", *sets])


def gc(spec: Spec, ws: Workspace, delete: bool = True) -> list[CleanupStep]:
    """All steps."""
    return list(collect(spec, ws, datetime.now(UTC) + timedelta(hours=1), delete))
