"""Requests to a store; a conditional PUT that was done and not answered, which the client sends again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.storage import Location
from headrace.storage.objects import calls, store
from tests.storage_support import left_over, memory_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    return memory_home(monkeypatch, tmp_path, readers=("other",))


@pytest.fixture
def unanswered(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each PUT on a condition is sent twice."""
    put_new, put_if = calls.put_new, calls.put_if

    def new_twice(bucket: Any, key: str, data: bytes) -> str | None:
        put_new(bucket, key, data)
        return put_new(bucket, key, data)

    def if_twice(bucket: Any, key: str, data: bytes, revision: str) -> str | None:
        put_if(bucket, key, data, revision)
        return put_if(bucket, key, data, revision)

    monkeypatch.setattr(calls, "put_new", new_twice)
    monkeypatch.setattr(calls, "put_if", if_twice)


def test_a_large_file_is_read_whole_by_few_requests(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    data, ranged, ranges = bytes(range(256)) * 400, calls.get_range, []

    def counted(bucket: Any, key: str, start: int, size: int) -> bytes:
        ranges.append((start, size))
        return ranged(bucket, key, start, size)

    monkeypatch.setattr(calls, "get_range", counted)
    monkeypatch.setattr(store, "_SMALL", 1)
    (home / "a").put_bytes(data)
    assert (home / "a").read_bytes() == data
    assert ranges == [(0, len(data))]
    with (home / "a").open() as f:
        assert f.read(10) == data[:10]
        assert f.read() == data[10:]
        assert f.read() == b""


@pytest.mark.usefixtures("unanswered")
def test_a_new_file_is_its_writers(home: Location) -> None:
    file = home / "log" / "1"
    assert file.put_new_text("mine")
    assert not file.put_new_text("another")
    assert file.read_text() == "mine"


@pytest.mark.usefixtures("unanswered")
def test_a_line_is_added_once(home: Location) -> None:
    for line in ("1\n", "2\n", "2\n", "3\n"):
        (home / "log").append(line.encode())
    assert (home / "log").read_text() == "1\n2\n2\n3\n"


def test_a_line_is_added_once_though_another_follows_it(home: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    put_if = calls.put_if
    (home / "log").append(b"1\n")

    def overtaken(bucket: Any, key: str, data: bytes, revision: str) -> str | None:
        monkeypatch.setattr(calls, "put_if", put_if)
        put_if(bucket, key, data, revision)
        Location(home.path / "log", "other").append(b"3\n")
        return put_if(bucket, key, data, revision)

    monkeypatch.setattr(calls, "put_if", overtaken)
    (home / "log").append(b"2\n")
    assert (home / "log").read_text() == "1\n2\n3\n"


@pytest.mark.usefixtures("unanswered")
def test_a_folder_is_published_and_changed_and_leaves_nothing(home: Location) -> None:
    for text in ("1", "2"):
        with (home / "x").new_folder() as folder:
            (folder / "a").put_text(text)
    (home / "x" / "b").put_text("b")
    assert {f.below(home): f.read_text() for f in home.files()} == {"x/a": "2", "x/b": "b"}
    assert left_over(home) == []


@pytest.mark.usefixtures("unanswered")
def test_a_delta_commit_is_not_taken_for_another_writers(home: Location) -> None:
    table = home / "table"
    assert create_table(table, [{"name": "ds", "type": "string", "nullable": True, "metadata": {}}], ["ds"])
    for version in (1, 2):
        add = {"path": f"ds=d1/{version}", "partitionValues": {"ds": "d1"}, "size": 9, "modificationTime": 1}
        assert Transaction(table).replace("ds", ["d1"], [add | {"dataChange": True}], "") == version
    log = DeltaLog(table)
    assert log.version == 2
    assert [f.path.name for f in log.files(2) or ()] == ["2"]


def test_threads_that_begin_at_once_share_a_bucket_and_what_is_known_of_it() -> None:
    opened: list[str] = []

    def open_bucket(scheme: str, bucket: str) -> Any:
        time.sleep(0.02)  # a client that is set up
        opened.append(bucket)
        return object()

    many = store.ObjectStore("memory", open_bucket)
    start = threading.Barrier(32)

    def first_look(n: int) -> tuple[Any, Any]:
        start.wait()
        path = PurePosixPath(f"/bucket{n % 2}/folder/{n}")
        return many._resolve(path)[0], many.plain()._resolve(path)[0]

    with ThreadPoolExecutor(32) as pool:
        looks = list(pool.map(first_look, range(32)))
    assert sorted(opened) == ["bucket0", "bucket1"]
    for n, (tree, plain) in enumerate(looks):
        assert (tree, plain) == looks[n % 2]
        assert plain.bucket is tree.bucket
