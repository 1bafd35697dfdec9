"""Reading row groups without Arrow's decoder: beside Arrow's, for every layout; and memory that is used again."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Train
from headrace.config.workspace import Workspace
from headrace.dataset import native
from headrace.dataset.layout import split_of
from headrace.dataset.loaders import TrainLoader
from headrace.dataset.row_groups import BufferPool, StoredRowGroup
from headrace.errors import UserError
from headrace.stage.manifest import Manifest

_TYPES = (pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.int16(), pa.date32(), pa.bool_(), pa.string())
PLAIN = {"compression": "none", "use_dictionary": False}


@pytest.fixture(autouse=True)
def built() -> None:
    assert native.library() is not None, "run make native"


def column(kind: pa.DataType, rows: int, null_share: float, rng: np.random.Generator) -> pa.Array:
    values = rng.integers(0, 100, rows).astype(np.int32)
    # Some begin with nulls and go on without: levels in several runs.
    missing = rng.random(rows) < (null_share if rng.random() < 0.5 else null_share * (np.arange(rows) < rows / 3))
    array = pa.array(values, mask=missing)
    return array.cast(pa.float64()).cast(kind) if pa.types.is_floating(kind) else array.cast(kind)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(1, 5_000)),
    group=st.sampled_from([7, 1_000, 10_000]),
    nulls=st.sampled_from([0.0, 0.0, 0.02, 1.0]),
    page=st.sampled_from([64, 1_000, 1 << 20]),
    compression=st.sampled_from(["none", "none", "snappy"]),
    dictionary=st.booleans(),
    version=st.sampled_from(["1.0", "1.0", "2.0"]),
    statistics=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_layout_is_read_as_arrow_reads_it(
    rows: int,
    group: int,
    nulls: float,
    page: int,
    compression: str,
    dictionary: bool,
    version: str,
    statistics: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    required = rng.random(len(_TYPES)) < 0.3
    fields = [pa.field(f"c{i}", kind, nullable=not r) for i, (kind, r) in enumerate(zip(_TYPES, required, strict=True))]
    columns = [column(f.type, rows, nulls if f.nullable else 0.0, rng) for f in fields]
    lists = pa.array([list(range(n)) for n in rng.integers(0, 4, rows)], pa.list_(pa.int32()))
    table = pa.Table.from_arrays([*columns, lists], schema=pa.schema([*fields, pa.field("list", lists.type)]))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "part.parquet")
        pq.write_table(
            table,
            path,
            row_group_size=group,
            compression=compression,
            use_dictionary=dictionary,
            data_page_size=page,
            data_page_version=version,
            write_statistics=statistics,
        )
        names = [str(c) for c in rng.permutation(table.column_names)[: rng.integers(1, table.num_columns + 1)]]
        buffers = BufferPool()
        simple = version == "1.0" and compression == "none" and not dictionary
        with pq.ParquetFile(path) as file:
            for index in range(file.num_row_groups):
                with StoredRowGroup(path, index, names, buffers) as stored:
                    assert stored.num_rows == file.metadata.row_group(index).num_rows
                    for name in names:
                        expected = file.read_row_group(index, columns=[name]).column(0)
                        decoded = stored.column(name)
                        assert expected.type == decoded.type == stored.type_of(name)
                        assert pa.chunked_array(getattr(decoded, "chunks", [decoded])) == expected
                        quick = simple and expected.type in _TYPES[:4] and expected.null_count == 0
                        assert isinstance(decoded, pa.Array) == quick, name


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 700), value=st.integers(0, 255), data=st.data())
def test_damaged_pages_do_no_harm(place: int, value: int, data: st.DataObject) -> None:
    """Whatever a page's bytes say, nothing outside of it is read, and no more is written than there is room for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.parquet"
        rows = 100
        table = pa.table({"a": np.arange(rows, dtype=np.int32), "b": np.arange(rows, dtype=np.float32)})
        pq.write_table(table, path, **PLAIN)
        content = bytearray(path.read_bytes())
        with pq.ParquetFile(path) as file:
            footer = file.metadata
        content[4 + place % (len(content) - 4)] = value
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(4, len(content))) :]
        path.write_bytes(content)
        block = np.full(4 * rows + 64, 7, np.uint8)
        with path.open("rb") as opened:
            for i in range(2):
                chunk = footer.row_group(0).column(i)
                start, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
                native.read_plain(opened.fileno(), start, end, 4, True, rows, block[: 4 * rows])
        assert (block[4 * rows :] == 7).all()


@settings(max_examples=50, deadline=None)
@given(n=st.one_of(st.integers(0, 5), st.integers(0, 70_000)), seed=st.integers(0, 2**64))
def test_orders_are_numpys(n: int, seed: int) -> None:
    order = native.permutation(np.random.default_rng(seed), n)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, np.random.default_rng(seed).permutation(n))


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32, np.float64, np.int16])
@pytest.mark.parametrize("to", [np.int32, np.int64, np.float32])
def test_gather(kind: type, to: type, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(native, "library", lambda: None)
    rng = np.random.default_rng(0)
    source = rng.integers(-100, 100, 2_000).astype(kind)
    order = rng.integers(0, 1_000, 777).astype(np.int32)
    for values in (source[:1_000], source[::2]):
        matrices = [np.zeros((3, n + 5), to) for n in (1, 400, 16, 360)]
        targets = native.OutputColumns([m[:, 2:-3] for m in matrices])
        largest = native.gather(values, order, targets, 1)
        assert (np.concatenate([m[1, 2:-3] for m in matrices]) == values[order].astype(to)).all()
        for m in matrices:  # and nothing else is written
            m[1, 2:-3] = 0
            assert not m.any()
        if np.dtype(kind).kind == "i":
            width = np.dtype(kind).itemsize
            assert largest == int(values[order].view(f"u{width}").max())


def test_without_the_library_batches_are_the_same(
    ws: Workspace, make_dataset: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_dataset(ws, train=500, groups=4)
    split = split_of(manifest, ws, "train", ["row"])
    train = Train(batch_size=50, streams=2, ranks=1, seed=5)
    batches: list[list[Any]] = []
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(native, "library", lambda: None)
        with TrainLoader(*split, train, carried=["row"]) as source:
            batches.append([next(source) for _ in range(25)])
    for a, b in zip(*batches, strict=True):
        for x, y in zip(
            (a.continuous, a.codes, a.labels, a.carried["row"], a.lists["tags"].values, a.lists["tags"].offsets),
            (b.continuous, b.codes, b.labels, b.carried["row"], b.lists["tags"].values, b.lists["tags"].offsets),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"a": np.arange(9_000, dtype=np.int32)}), path, **PLAIN)
    with StoredRowGroup(str(path), 0, ["a"], BufferPool()) as stored:
        os.truncate(path, 20_000)
        with pytest.raises(UserError, match=r"part\.parquet cannot be read .*run the features stage again"):
            stored.column("a")
    with pytest.raises(UserError, match=r"part\.parquet cannot be read"):
        StoredRowGroup(str(path), 0, ["a"], BufferPool())


def test_memory_in_use_is_not_given_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # What an interpreter counts besides an array's users is its own affair, and differs between versions.
    monkeypatch.setattr(sys, "getrefcount", lambda x: 3)
    buffers = BufferPool(keep=4)
    rng = np.random.default_rng(0)
    held: list[tuple[int, Any]] = []
    addresses = set()
    for number in range(300):
        x = buffers.empty((3, int(rng.integers(1, 400))), np.int64)
        addresses.add(x.__array_interface__["data"][0])
        x[:] = number
        view = [x.T[1:], torch.from_numpy(x)[:, :1], pa.py_buffer(x), x.reshape(-1)[-1:]][number % 4]
        del x
        held.append((number, view))
        while len(held) > rng.integers(0, 7):
            held.pop(int(rng.integers(len(held))))
        for expected, block in held:
            values = np.frombuffer(block, np.int64) if isinstance(block, pa.Buffer) else np.asarray(block)
            assert (values == expected).all()
    assert len(addresses) < 250  # most of it was used again


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    buffers = BufferPool()
    first = buffers.empty((1_000,), np.float32)
    place, view = first.__array_interface__["data"][0], first[10:20]
    del first
    second = buffers.empty((1_000,), np.float32)
    assert second.__array_interface__["data"][0] != place
    del view
    assert buffers.empty((990,), np.int32).__array_interface__["data"][0] == place


def test_portions_need_no_more_memory_than_their_rows(ws: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    """Epoch after epoch the same blocks are used."""
    manifest = make_dataset(ws, train=1_000, groups=4)
    split = split_of(manifest, ws, "train")
    with TrainLoader(*split, Train(batch_size=50, streams=2, ranks=1)) as source:
        places = set()
        for _ in range(400):  # twenty epochs
            places.add(next(source).codes.__array_interface__["data"][0])
    assert len(places) <= 20
