"""One home for each kind of store, for tests of what all of them promise."""

from __future__ import annotations

import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from headrace.storage import Location, local, location
from headrace.storage.objects.file_list import is_unfinished
from headrace.storage.objects.store import ObjectStore
from tests.hadoop_servers import Hdfs


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
