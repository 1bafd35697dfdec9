"""Objects of a store that counts generations, by its own client: GCS puts on the condition of one, not of a tag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest

from headrace.storage import Location, location
from headrace.storage.objects import calls
from headrace.storage.objects.store import ObjectStore
from tests.gcs_server import gcs_bucket


@pytest.fixture
def bucket() -> Iterator[Any]:
    with gcs_bucket() as gcs:
        yield gcs


def test_a_put_replaces_the_generation_that_was_read_and_no_other(bucket: Any) -> None:
    """The generation counts even where the content, and so the tag, is the same again."""
    assert calls.put_new(bucket, "a/b", b"1") is not None
    assert calls.put_new(bucket, "a/b", b"1") is None
    first = calls.head(bucket, "a/b")
    assert first is not None
    assert first.version == "1"
    assert calls.put_if(bucket, "a/b", b"2", first.revision) is not None
    assert calls.put(bucket, "a/b", b"1") == first.tag
    assert calls.put_if(bucket, "a/b", b"3", first.revision) is None
    stored = calls.get(bucket, "a/b")
    assert stored is not None
    assert (stored[0], stored[1].tag, stored[1].version) == (b"1", first.tag, "3")


def test_files_are_replaced_and_added_to(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(location.STORES, "gs", ObjectStore("gs", lambda scheme, name: bucket))
    home = Location(PurePosixPath("/bucket"), "gs")
    file = home / "manifest.json"
    assert file.put_if(b"old", None)
    read = file.read_tagged()
    assert read is not None
    assert file.put_if(b"new", read[1])
    assert not file.put_if(b"late", read[1])
    assert file.read_bytes() == b"new"
    for line in ("1\n", "2\n"):
        (home / "log").append(line.encode())
    assert (home / "log").read_text() == "1\n2\n"
