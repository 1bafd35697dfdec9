"""Row groups from a store of objects: fetched ahead, once for a host, within bounds, and the batches of local files."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm import World
from headrace.config import Train
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch
from headrace.dataset.layout import LISTING, RowGroup, SplitLayout, split_of
from headrace.dataset.loaders import EvalLoader, TrainLoader
from headrace.dataset.row_groups import BufferPool, ReadAhead
from headrace.errors import UserError
from headrace.errors.stores import StoreError
from headrace.stage.manifest import Manifest
from headrace.storage import location, release_copy
from headrace.storage.objects import calls, copies
from headrace.storage.objects.store import ObjectStore
from tests.storage_support import memory_home

TRAIN = Train(batch_size=64, streams=4, seed=3, read_ahead_mib=1)
Split = tuple[SplitLayout, DatasetSchema]


@dataclass
class Place:
    """A file of a store that notes when it was fetched."""

    name: int
    fetched: list[int] = field(default_factory=list)
    scheme: str = "s3"

    def local_path(self) -> Path:
        self.fetched.append(self.name)
        return Path(str(self.name))


@given(sizes=st.lists(st.integers(0, 900 << 10), max_size=30), mib=st.integers(1, 3), streams=st.integers(1, 3))
def test_what_follows_is_fetched_once_in_order_and_within_bounds(sizes: list[int], mib: int, streams: int) -> None:
    fetched: list[int] = []
    groups = [RowGroup(i, Place(i, fetched), 0, 1, n) for i, n in enumerate(sizes)]  # type: ignore[arg-type]
    requested: list[int] = []

    def order() -> Iterator[int]:
        for i in range(len(sizes)):
            requested.append(i)
            yield i

    used = []
    with ReadAhead(streams, mib) as ahead:
        for i, arriving in ahead.follow(order(), groups.__getitem__):
            # The last one that was asked for is looked at before there is room for it.
            held = [sizes[n] for n in requested[i + 1 : None if requested[-1] == len(sizes) - 1 else -1]]
            assert sum(held[:-1]) <= (mib << 20) // streams or len(held) <= 2
            assert arriving.path() == Path(str(i))
            used.append(arriving.group.piece)
    assert used == list(range(len(sizes)))
    assert sorted(fetched) == used


def test_the_next_row_group_is_fetched_while_one_is_used() -> None:
    """Endless orders, too: what is asked for ahead has an end."""
    arrived = threading.Semaphore(0)

    class Counted(Place):
        def local_path(self) -> Path:
            arrived.release()
            return super().local_path()

    group = RowGroup(0, Counted(0), 0, 1, 1 << 20)  # type: ignore[arg-type]
    with ReadAhead(1, 1) as ahead:
        followed = ahead.follow(itertools.count(), lambda _: group)
        next(followed)
        for _ in range(2):
            assert arrived.acquire(timeout=60)  # the one that is used, and the next


@pytest.fixture
def manifest(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> Manifest:
    """Make a dataset with a file for each row group, and their listing, as the features stage writes it."""
    ws = Workspace(tmp_path / "home")
    dataset = make_dataset(ws, train=2003, groups=12)
    folder = ws.locate(dataset.output("dataset").name).local_path()
    listed = []
    for split in ("train", "valid"):
        parts = sorted((folder / split).iterdir())
        rows = pa.concat_tables(map(pq.read_table, parts))
        for file in parts:
            file.unlink()
        for i, start in enumerate(range(0, rows.num_rows, 170)):
            file = folder / split / f"part-{i:04d}.parquet"
            pq.write_table(rows.slice(start, 170), file, compression="none", use_dictionary=False)
            n = min(170, rows.num_rows - start)
            listed.append({"name": f"{split}/{file.name}", "size": file.stat().st_size, "rows": n, "row_groups": 1})
    (folder / LISTING).write_text(json.dumps(listed))
    return dataset


@pytest.fixture
def local_split(tmp_path: Path, manifest: Manifest) -> Split:
    return split_of(manifest, Workspace(tmp_path / "home"), "train", ["row"])


@pytest.fixture
def stored_split(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, local_split: Split) -> Split:
    """Return the same split in a store of objects."""
    ws = Workspace(tmp_path / "home")
    memory_home(monkeypatch, tmp_path / "cache", ("s3",))
    elsewhere = Workspace(tmp_path / "elsewhere", store_uri="s3://bucket/store")
    name = manifest.output("dataset").name
    with elsewhere.locate(name).new_folder() as folder:
        folder.copy_from(ws.locate(name))
    stored = split_of(manifest, elsewhere, "train", ["row"])
    assert not (tmp_path / "cache" / "files").exists()  # row groups are counted in the listing
    assert stored[0].rows == local_split[0].rows
    return stored


def batches(split: Split, rank: int = 0, ranks: int = 1, train: Train = TRAIN) -> list[Batch]:
    with TrainLoader(*split, train, World(rank, ranks), carried=["row"]) as source:
        return list(itertools.islice(source, 60))


def assert_equal(actual: list[Batch], expected: list[Batch]) -> None:
    for a, b in zip(actual, expected, strict=True):
        for x, y in ((a.continuous, b.continuous), (a.codes, b.codes), (a.labels, b.labels)):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(a.carried["row"], b.carried["row"])


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the downloads of each object, by key."""
    counted: Counter[str] = Counter()
    real = calls.download

    def download(bucket: Any, key: str, file: Path) -> calls.Stored:
        counted[key] += 1
        return real(bucket, key, file)

    monkeypatch.setattr(calls, "download", download)
    return counted


def test_two_ranks_of_a_host_fetch_their_own_files_once(
    local_split: Split, stored_split: Split, downloads: Counter[str]
) -> None:
    """Two epochs by each of two ranks, twice: as two processes would that share the cache."""
    files = {g.path.name for g in stored_split[0].row_groups}
    local_files = {g.path.name for s in (0, 1) for g in stored_split[0].stream(s, TRAIN.streams)}
    assert_equal(batches(stored_split, 0, 2), batches(local_split, 0, 2))
    assert {key.rsplit("/", 1)[1] for key in downloads} == local_files
    assert len(local_files) < len(files)
    with ThreadPoolExecutor(4) as pool:
        by_rank = list(pool.map(lambda rank: batches(stored_split, rank, 2), (0, 1, 0, 1)))
    for rank in range(4):
        assert_equal(by_rank[rank], batches(local_split, rank % 2, 2))
    with EvalLoader(*stored_split, batch_size=64, streams=4) as source:
        assert sum(batch.rows for batch in source) == local_split[0].rows
    assert {key.rsplit("/", 1)[1]: n for key, n in downloads.items()} == dict.fromkeys(files, 1)


def test_a_small_cache_holds_what_is_ahead_and_little_more(
    local_split: Split, stored_split: Split, downloads: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(g.path.size() for g in stored_split[0].row_groups)
    limit, one_stream = 4 * largest, TRAIN.model_copy(update={"streams": 1})
    monkeypatch.setenv(copies.LIMIT, str(limit / 2**30))
    monkeypatch.setattr("headrace.dataset.row_groups._MOST", 2)
    peaks = []
    real = copies._make_room

    def watched(path: Path, size: int) -> None:
        real(path, size)
        peaks.append(size + sum(stat.st_size for stat, _ in copies._files(tmp_path / "cache")))

    monkeypatch.setattr(copies, "_make_room", watched)
    assert_equal(batches(stored_split, train=one_stream), batches(local_split, train=one_stream))
    assert max(downloads.values()) > 1
    # Two are fetched at once, and neither counts the other.
    assert max(peaks) <= limit + 2 * largest < sum(g.path.size() for g in stored_split[0].row_groups)


def test_a_copy_that_went_before_it_was_opened_is_fetched_again(stored_split: Split, downloads: Counter[str]) -> None:
    groups = stored_split[0].row_groups[:1]
    with ReadAhead(1, 1) as ahead:
        ((_, arriving),) = ahead.follow(iter(groups), lambda group: group)
        arriving.path().unlink()
        with arriving.open(["row"], BufferPool()) as rows:
            assert rows.num_rows == groups[0].rows
    assert sorted(downloads.values()) == [2]
    release_copy(Path("/nowhere/else"))  # no file of the cache: nothing happens


def test_an_object_that_the_store_does_not_give_is_named(
    stored_split: Split, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = stored_split[0].row_groups[3].path.name
    real = calls.download

    def download(bucket: Any, key: str, file: Path) -> calls.Stored:
        if key.endswith(name):
            raise StoreError(f"{key}: HTTP error: 503 Slow Down")
        return real(bucket, key, file)

    monkeypatch.setattr(calls, "download", download)
    with pytest.raises(StoreError, match=rf"/train/{name}: HTTP error: 503"):
        batches(stored_split)
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("fault", ["gone", "changed"])
def test_an_object_that_is_gone_or_another_one_is_named_as_it_is_stored(stored_split: Split, fault: str) -> None:
    path = stored_split[0].row_groups[3].path
    store = location.STORES[path.scheme]
    assert isinstance(store, ObjectStore)
    tree, key = store._resolve(path.path)
    entry = tree.look(key, lambda bucket, k: calls.get_small(bucket, k, None))
    assert entry is not None
    if fault == "gone":
        calls.delete(tree.bucket, [entry[1].key])
    else:
        calls.put(tree.bucket, entry[1].key, b"other")
    with pytest.raises(UserError, match=rf"s3://bucket/store/datasets/.*{path.name} cannot be read .* features stage"):
        batches(stored_split)


def test_a_copy_that_went_and_whose_object_is_gone_is_named_as_it_is_stored(stored_split: Split) -> None:
    groups = stored_split[0].row_groups[:1]
    path = groups[0].path
    store = location.STORES[path.scheme]
    assert isinstance(store, ObjectStore)
    with ReadAhead(1, 1) as ahead:
        ((_, arriving),) = ahead.follow(iter(groups), lambda group: group)
        arriving.path().unlink()
        tree, key = store._resolve(path.path)
        entry = tree.look(key, lambda bucket, k: calls.get_small(bucket, k, None))
        assert entry is not None
        calls.delete(tree.bucket, [entry[1].key])
        with pytest.raises(UserError, match=rf"s3://bucket/store/datasets/.*{path.name} cannot be read"):
            arriving.open(["row"], BufferPool())


def test_a_damaged_object_is_named_as_it_is_stored(stored_split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    real = calls.download

    def download(bucket: Any, key: str, file: Path) -> calls.Stored:
        downloaded = real(bucket, key, file)
        file.write_bytes(b"x" * downloaded.size)
        return downloaded

    monkeypatch.setattr(calls, "download", download)
    with pytest.raises(UserError, match=r"s3://bucket/store/datasets/.*parquet cannot be read"):
        batches(stored_split)
