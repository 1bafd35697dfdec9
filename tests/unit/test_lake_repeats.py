"""Hashes of keys that are there twice, found range by range, against counting all of them."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.delta.data_files import SOURCE_FILE, SOURCE_LINE
from headrace.lake.landing.repeats import (
    REPEATED,
    KeyedFile,
    RepeatTask,
    SuspectTask,
    hashes_of_share,
    load_hashes,
    save_array,
    save_hashes,
)
from headrace.storage import Location, local
from tests.storage_support import memory_home

LEAST, MOST = -(1 << 63), (1 << 63) - 1
HASHES = st.one_of(st.integers(LEAST, MOST), st.sampled_from([LEAST, LEAST + 1, -1, 0, 1, MOST]))
#: A data file: (hash, whether the row has a key) of each row.
FILES = st.lists(st.lists(st.tuples(HASHES, st.booleans()), max_size=12), max_size=4)


def saved(scratch: Location, rows: Sequence[tuple[int, bool]]) -> str:
    """Save hashes in two pieces and return their names."""
    hashes, keyed = np.array([h for h, _ in rows], np.int64), np.array([k for _, k in rows], np.bool_)
    half = len(rows) // 2
    return save_hashes(scratch, [hashes[:half], hashes[half:]], [keyed[:half], keyed[half:]])


def repeated(scratch: Location, day_files: Sequence[str], loaded: Sequence[str], shares: int) -> list[int]:
    """Return the hashes that the shares find, one share after the other."""
    task = RepeatTask(tuple(day_files), tuple(loaded), scratch, shares)
    arrays = [np.load((scratch / entry["path"]).local_path()) for k in range(shares) for entry in task(k)]
    return [int(h) for h in np.concatenate(arrays)]


@given(FILES, FILES, st.integers(1, 9))
def test_all_that_are_there_twice(
    tmp_path_factory: pytest.TempPathFactory,
    day_files: list[list[tuple[int, bool]]],
    loaded: list[list[tuple[int, bool]]],
    shares: int,
) -> None:
    scratch = local(tmp_path_factory.mktemp("hashes"))
    names, loaded_names = ([saved(scratch, file) for file in files] for files in (day_files, loaded))
    counts = Counter(h for file in day_files for h, keyed in file if keyed)
    loaded_hashes = {h for file in loaded for h, keyed in file if keyed}
    assert repeated(scratch, names, loaded_names, shares) == sorted(
        h for h, n in counts.items() if n > 1 or h in loaded_hashes
    )
    for name, rows in zip(names, day_files, strict=True):
        hashes, keyed = load_hashes(scratch, name)
        assert list(zip(hashes.tolist(), keyed.tolist(), strict=True)) == rows
        ranges = [hashes_of_share(scratch, name, k, shares) for k in range(shares)]
        assert np.concatenate(ranges).tolist() == sorted(h for h, k in rows if k)


def test_files_of_a_store_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = memory_home(monkeypatch, tmp_path)
    names = [saved(lake, [(5, True), (7, True), (9, False)]), saved(lake, [(9, True), (7, True)])]
    assert repeated(lake, names[:1], names[1:], 3) == [7]
    assert [x.tolist() for x in load_hashes(lake, names[0])] == [[5, 7, 9], [True, True, False]]
    save_array(lake / REPEATED, np.array([7]))
    rows = pa.table({"id": ["a", "b", "c"], SOURCE_FILE: ["x"] * 3, SOURCE_LINE: [1, 2, 3]})
    with (lake / "data.parquet").new_file() as place:
        pq.write_table(rows, place)
    files = (KeyedFile(lake / "data.parquet", "2026-01-01", hashes=names[0]),)
    task = SuspectTask(files, ("id",), None, lake, rows.schema)
    (result,) = task(0)
    suspect = pq.read_table((lake / result["path"]).local_path()).to_pylist()
    assert suspect == [{"id": "b", "ds": "2026-01-01"}]


def test_memory_is_that_of_a_range(tmp_path: Path) -> None:
    scratch, rng = local(tmp_path), np.random.default_rng(5)
    peaks = {}
    for files in (2, 16):
        names = [saved(scratch, [(int(h), True) for h in rng.integers(LEAST, MOST, 20_000)]) for _ in range(2 * files)]
        tracemalloc.start()
        assert repeated(scratch, names[:files], names[files:], files) == []
        peaks[files] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # 20,000 hashes a range take 160 kB.
    assert peaks[16] < 1.2 * peaks[2] < 10 * 160_000
