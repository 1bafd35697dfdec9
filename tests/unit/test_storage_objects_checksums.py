"""Checksums of published files: in the list as they were written, whoever wrote them, and looked at by who reads."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors.stores import ChangedInPlace
from headrace.storage import LeaseLost, Location, local, location
from headrace.storage.objects import calls
from headrace.storage.objects.calls import crc32_of
from headrace.storage.objects.store import ObjectStore
from headrace.storage.objects.tree import FileList
from tests.storage_support import left_over, memory_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    return memory_home(monkeypatch, tmp_path / "cache")


def listed(thing: Location) -> FileList:
    store = location.STORES[thing.scheme]
    assert isinstance(store, ObjectStore)
    tree, key = store._resolve(thing.path)
    tree.forget(key)
    published = tree.published(key)
    assert published is not None
    return published.list


def checksums(thing: Location) -> dict[str, str | None]:
    return {name: f.crc32 for name, f in listed(thing).files.items()}


def crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


@given(st.binary(max_size=50), st.integers(1, 9))
def test_a_file_in_blocks_is_as_its_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, block: int) -> None:
    file = tmp_path_factory.mktemp("crc") / "file"
    file.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_CHECKSUM_BLOCK", block)
        assert crc32_of(file) == crc32_of(data) == f"{zlib.crc32(data):08x}"


def test_all_that_is_written_in_a_folder_has_its_checksum(home: Location, tmp_path: Path) -> None:
    (tmp_path / "local").write_text("from a disk")
    with (home / "other").new_folder() as folder:
        (folder / "a").put_text("of another folder")
    with (home / "thing").new_folder() as folder:
        (folder / "deep" / "put").put_text("put")
        with (folder / "a b%").new_file() as path:
            path.write_text("uploaded")
        (folder / "copied").copy_from(home / "other" / "a")
        (folder / "from-disk").copy_from(local(tmp_path / "local"))
        with (folder / "inner").new_folder() as inner:
            (inner / "x").put_text("of a folder in it")
    expected = {
        "deep/put": crc("put"),
        "a b%": crc("uploaded"),
        "copied": crc("of another folder"),
        "from-disk": crc("from a disk"),
        "inner/x": crc("of a folder in it"),
    }
    assert checksums(home / "thing") == expected
    (home / "thing" / "deep" / "put").put_text("changed")
    assert checksums(home / "thing") == expected | {"deep/put": crc("changed")}
    assert left_over(home) == []


def test_files_written_twice_have_one_where_both_were_alike(home: Location) -> None:
    thing = home / "thing"
    thing.begin("shared")
    for text in ("one", "two"):
        (thing.building("shared") / "alike").put_text("same")
        (thing.building("shared") / "other").put_text(text)
    thing.commit("shared")
    assert checksums(thing) == {"alike": crc("same"), "other": None}
    assert (thing / "other").read_text() == "two"
    assert left_over(home) == []


def test_the_files_of_a_token_that_is_used_again_keep_theirs(home: Location) -> None:
    """The files are moved out of the way of the second use."""
    thing = home / "thing"
    for name in ("a", "b"):
        thing.begin("shared")
        (thing.building("shared") / name).put_text(name)
        if name == "b":
            assert checksums(thing) == {"a": crc("a")}
        thing.commit("shared")
    assert checksums(thing) == {"b": crc("b")}


def test_a_lost_task_writes_nothing_into_what_is_published(home: Location, tmp_path: Path) -> None:
    """Its file has the same content, and in most stores would be another one than the list names."""
    thing = home / "thing"
    place = thing.begin("shared")
    (place / "part").put_text("rows")
    (tmp_path / "local").write_text("rows")

    def late() -> list[Callable[[], object]]:
        def uploaded() -> None:
            with (place / "part").new_file() as path:
                path.write_text("rows")

        return [
            lambda: (place / "part").put_text("rows"),
            uploaded,
            lambda: (place / "part").copy_from(local(tmp_path / "local")),
            lambda: (place / "other").copy_from(thing / "part"),
        ]

    for write in late()[:3]:
        write()
    thing.commit("shared")
    files_before = listed(thing)
    for write in late():
        with pytest.raises(LeaseLost, match="is published, or was begun anew, since"):
            write()
    assert (thing / "part").read_text() == "rows"
    assert listed(thing) == files_before
    assert left_over(home) == []


def by_copy(file: Location) -> Any:
    return file.local_path()


def read_whole(file: Location) -> Any:
    return file.read_bytes()


@pytest.mark.parametrize("read", [by_copy, read_whole])
def test_what_was_damaged_on_its_way_is_refused(
    read: Callable[[Location], Any], home: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (home / "thing").new_folder() as folder:
        (folder / "a").put_text("as it was written")
    download, get_small = calls.download, calls.get_small

    def damaged_file(bucket: Any, key: str, file: Path) -> Any:
        info = download(bucket, key, file)
        file.write_text(file.read_text().replace("was", "is "))
        return info

    def damaged_bytes(bucket: Any, key: str, limit: int | None) -> Any:
        content = get_small(bucket, key, limit)
        if content is None or not key.endswith("/a"):
            return content
        return (content[0] or b"").replace(b"was", b"is "), content[1]

    with monkeypatch.context() as patch:
        patch.setattr(calls, "download", damaged_file)
        patch.setattr(calls, "get_small", damaged_bytes)
        with pytest.raises(ChangedInPlace, match=r"thing/.*a is damaged: its CRC-32 is \w{8}, and \w{8} was written"):
            read(home / "thing" / "a")
    # Nothing of it is kept.
    read(home / "thing" / "a")
    assert (home / "thing" / "a").local_path().read_text() == "as it was written"


def test_lists_of_before_are_read(home: Location) -> None:
    with (home / "thing").new_folder() as folder:
        (folder / "a").put_text("text")
    store = location.STORES[home.scheme]
    assert isinstance(store, ObjectStore)
    tree, key = store._resolve((home / ".headrace" / "lists" / "thing.json").path)
    unchecked = FileList(
        files={n: f.model_copy(update={"crc32": None}) for n, f in listed(home / "thing").files.items()}
    )
    assert b"crc32" not in unchecked.encoded()
    calls.put(tree.bucket, key, unchecked.encoded())
    assert checksums(home / "thing") == {"a": None}
    assert (home / "thing" / "a").local_path().read_text() == "text"
