"""Column chunks as dictionaries: what Arrow's decoder reads of the same file, whole and damaged, of many shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config.schema import TableColumn
from headrace.dataset import native
from headrace.dataset.layout import column_bytes
from headrace.features.arrow import decode
from headrace.features.arrow.decode import LakeFile, RowGroupLayout, row_groups
from headrace.features.arrow.kernels import dictionary_columns
from headrace.features.types import ValueType, declared
from headrace.storage import local

TYPES = {"text": pa.string(), "small": pa.int32(), "large": pa.int64()}
pytestmark = pytest.mark.skipif(native.library() is None, reason="make native")


def values(draw: st.DrawFn, elements: st.SearchStrategy[Any], rows: int, nulls: float) -> list[Any]:
    """Draw values that repeat, in runs and in turns, with nulls among them."""
    few = draw(st.lists(elements, min_size=1, max_size=draw(st.sampled_from([1, 3, 40, 300]))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    picked = rng.integers(0, len(few), rows)
    if draw(st.booleans()):
        picked.sort()
    is_null = rng.random(rows) < nulls
    return [None if none else few[i] for i, none in zip(picked.tolist(), is_null.tolist(), strict=True)]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Draw columns of the types that are read."""
    rows = draw(st.sampled_from([1, 7, 64, 65, 1_000, 3_001]))
    texts = st.one_of(st.text(max_size=5), st.text("ab", min_size=0, max_size=70))
    kinds = {"text": texts, "small": st.integers(-(2**31), 2**31 - 1), "large": st.integers(-(2**63), 2**63 - 1)}
    columns = {
        name: pa.array(values(draw, kind, rows, draw(st.sampled_from([0, 0.01, 0.5, 1]))), TYPES[name])
        for name, kind in kinds.items()
    }
    if draw(st.booleans()):  # without definition levels, where nothing is null
        fields = [pa.field(name, x.type, nullable=x.null_count > 0) for name, x in columns.items()]
        return pa.table(list(columns.values()), schema=pa.schema(fields))
    return pa.table(columns)


def read(path: Path, group: int) -> Mapping[str, pa.DictionaryArray]:
    file = pq.ParquetFile(path, read_dictionary=["text"])
    with path.open("rb") as stored:
        return dictionary_columns(file, stored.fileno(), group, TYPES)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.data())
def test_as_arrow_reads_them(tmp_path: Path, table: pa.Table, data: st.DataObject) -> None:
    path = tmp_path / "a.parquet"
    full = data.draw(st.sampled_from([64, 1 << 20]), "bytes of a dictionary")
    pq.write_table(
        table,
        path,
        row_group_size=data.draw(st.sampled_from([100, 5_000]), "rows of a row group"),
        compression=data.draw(st.sampled_from(["snappy", "none"]), "compression"),
        dictionary_pagesize_limit=full,
        data_page_size=data.draw(st.sampled_from([40, 1_000, 1 << 20]), "bytes of a page"),
        write_batch_size=32,
    )
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        expected = file.read_row_group(group)
        columns = read(path, group)
        # Integers that follow their dictionary as they are, are Arrow's.
        assert "text" in columns
        assert full == 64 or set(columns) == set(TYPES)
        for name, column in columns.items():
            assert column.dictionary_decode().to_pylist() == expected.column(name).to_pylist()
            assert not column.indices.null_count
            assert len(column.dictionary.unique()) == len(column.dictionary)
            assert column.dictionary.null_count == bool(expected.column(name).null_count)
            column.validate(full=True)


@pytest.mark.parametrize(
    "written", [{"compression": "zstd"}, {"data_page_version": "2.0"}, {"use_dictionary": False}], ids=str
)
def test_other_files_are_left_to_arrow(tmp_path: Path, written: dict[str, Any]) -> None:
    table = pa.table({"text": ["a", None, "a"], "small": pa.array([1, 1, 2], pa.int32())})
    pq.write_table(table, tmp_path / "a.parquet", **written)
    assert read(tmp_path / "a.parquet", 0) == {}


def test_other_types_are_left_to_arrow(tmp_path: Path) -> None:
    columns = {
        "text": pa.array([b"a", b"a"], pa.binary()),
        "small": pa.array([1, 1], pa.int16()),
        "large": pa.array([[1], [1]], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", 0) == {}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_are_read_as_something_or_left(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.parquet"
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "text": pa.array([None if i % 7 == 0 else f"value {i % 50}" for i in rng.integers(0, 900, 2_000)]),
            "small": pa.array(rng.integers(0, 300, 2_000), pa.int32()),
        }
    )
    compression = data.draw(st.sampled_from(["snappy", "none"]))
    pq.write_table(table, path, compression=compression, data_page_size=500, dictionary_pagesize_limit=200)
    content = bytearray(path.read_bytes())
    end = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    for column in read(path, 0).values():
        assert len(column) == 2_000
        # Texts of damaged bytes need not be UTF-8; Arrow does not look at them either.
        column.validate()
        assert column.indices.to_numpy().max() < len(column.dictionary)


def test_a_field_of_a_struct_is_no_column(tmp_path: Path) -> None:
    inner = pa.struct([pa.field("b", pa.int64(), nullable=False)])
    table = pa.table([pa.array([{"b": 1}] * 9, inner)], schema=pa.schema([pa.field("a", inner, nullable=False)]))
    pq.write_table(table, tmp_path / "a.parquet")
    with (tmp_path / "a.parquet").open("rb") as stored:
        file = pq.ParquetFile(tmp_path / "a.parquet")
        assert dictionary_columns(file, stored.fileno(), 0, {"a.b": pa.int64()}) == {}


def varint(n: int) -> bytes:
    encoded = b""
    while n > 0x7F:
        encoded, n = encoded + bytes([n & 0x7F | 0x80]), n >> 7
    return encoded + bytes([n])


@pytest.mark.parametrize(
    "chunk",
    [
        # Structs in each other, each in a byte.
        pytest.param(b"\x1c" * (4 << 20), id="deep"),
        # A dictionary page (type 2, 8 bytes) with so many values that 64 bits do not hold their bytes: 0, 8, or < 0.
        *(
            pytest.param(b"\x15\x04\x15\x10\x15\x10\x4c\x15" + varint(2 * n) + b"\x15\0\0\0" + bytes(8), id=str(n))
            for n in (2**60, 2**61, 2**61 + 1, 2**62)
        ),
    ],
)
def test_page_headers_that_no_writer_writes(tmp_path: Path, chunk: bytes) -> None:
    """They end no process."""
    (tmp_path / "chunk").write_bytes(chunk)
    lib = native.library()
    assert lib is not None
    with (tmp_path / "chunk").open("rb") as stored:
        assert lib.headrace_chunk_read(stored.fileno(), 0, len(chunk), 5, 2, 0, 0) is None


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"] * 5_000}), path)
    file = pq.ParquetFile(path)
    os.truncate(path, 30)
    with path.open("rb") as stored:
        assert dictionary_columns(file, stored.fileno(), 0, TYPES) == {}


@pytest.mark.parametrize("rows_a_part", [10_000, 700])
def test_row_groups_are_the_same_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_a_part: int
) -> None:
    """Also of row groups that are cut into parts, where a part keeps what its rows have."""
    columns = {
        "text": "string",
        "number": "int",
        "wide": "bigint",
        "as_wide": "bigint",
        "x": "double",
        "absent": "string",
    }
    types: dict[str, ValueType] = {n: declared(TableColumn(name=n, type=t)) for n, t in columns.items()}  # type: ignore[arg-type]
    rng = np.random.default_rng(2)
    n = 4_000
    table = pa.table(
        {
            "text": pa.array([None if i % 11 == 0 else f"value {i}" for i in rng.zipf(1.2, n) % 3_000]),
            "number": pa.array(rng.integers(0, 9, n), pa.int32()),
            "wide": pa.array(rng.integers(0, 2**60, n)),
            "as_wide": pa.array(rng.integers(0, 5, n), pa.int32()),
            "x": pa.array(rng.random(n)),
            "_source_file": pa.array(["f"] * n),
            "_source_line": pa.array(np.arange(n)),
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=2_000)
    monkeypatch.setattr(decode, "_DECODED_BYTES", rows_a_part * 7 * decode._CELL_BYTES)
    file, layout = LakeFile(local(path), path.stat().st_size), RowGroupLayout(types)
    contents = []
    for library in (native.library(), None):
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda library=library: library)
            groups, _ = row_groups(file, local(tmp_path / str(library is None)), layout)
        # Numbers of a dictionary's values have fewer bytes than a cell, so with them a part has more rows.
        assert len(groups) == 2 if rows_a_part > n else 2 < len(groups) <= 6
        cells = {c: [v for g in groups for v in g.column(c).decode().to_pylist()] for c in types}
        contents.append(cells | {"h": [h for g in groups for h in g.hashes.tolist()]})
        for part in groups:
            for name in ("text", "number"):
                column = part.column(name)
                assert column.indices is not None
                assert len(column.values) <= 8 * part.rows
    assert contents[0] == contents[1]
    assert contents[0]["text"] == table.column("text").to_pylist()


def test_long_texts_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary of them may hold no row group, so none is kept of the file's."""
    n = 600
    table = pa.table(
        {
            "long": pa.array([None if i % 9 == 0 else f"{i % 500} " * 40 for i in range(n)]),
            "short": pa.array([f"{i % 5}" for i in range(n)]),
            "_source_file": pa.array(["f"] * n),
            "_source_line": pa.array(np.arange(n)),
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    size = sum(column_bytes(pq.read_metadata(path), "long"))
    monkeypatch.setattr(decode, "_LONG_TEXTS", size - 1)
    monkeypatch.setattr(decode, "_DECODED_BYTES", size // 4)
    text = declared(TableColumn(name="t", type="string"))
    layout = RowGroupLayout({"long": text, "short": text})
    groups, _ = row_groups(LakeFile(local(path), path.stat().st_size), local(tmp_path / "home"), layout)
    assert len(groups) >= 4
    for name in ("long", "short"):
        assert [v for g in groups for v in g.column(name).decode().to_pylist()] == table.column(name).to_pylist()
        assert all(g.column(name).distinct for g in groups)
    assert all(sum(len(v or "") for v in g.column("long").values.to_pylist()) <= size // 2 for g in groups)
