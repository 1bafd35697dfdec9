"""Blocks of lines, and values of text, against plain Python."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.delta.data_files import DataFileWriter
from headrace.lake.landing.blocks import LineBlock, Part, UnreadableError, blocks, count_lines, odd_bytes, odd_json
from headrace.lake.landing.convert import from_json, from_text, list_of, split_list
from headrace.lake.landing.repeats import key_hashes
from headrace.lake.landing.write_rows import Dropped, rows_to_keep
from headrace.storage import local

LINES = st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=30)


@given(LINES, st.booleans(), st.integers(1, 40), st.integers(1, 4))
def test_parts_hold_each_line_once_with_its_number(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool, size: int, count: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    expected = data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
    path = local(tmp_path_factory.mktemp("lines") / "a.txt")
    path.put_bytes(data)
    edges = [len(data) * k // count for k in range(count + 1)]
    numbered_lines, first = [], 1
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        part = Part(0, path, start, end, first)
        part_blocks = list(blocks(part, size))
        for block in part_blocks:
            texts = block.texts(np.ones(len(block), np.bool_)).cast(pa.binary()).to_pylist()
            numbered_lines += list(zip(range(block.first_line, block.first_line + len(block)), texts, strict=True))
            for line, a, b in zip(texts, block.starts.tolist(), block.ends.tolist(), strict=True):
                assert block.data[a:b] == line.rstrip(b"\r")
        assert count_lines(part) == sum(len(b) for b in part_blocks)
        first += sum(len(b) for b in part_blocks)
    assert numbered_lines == list(enumerate(expected, 1))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no gzip"])
def test_damaged_gzip_is_no_end(tmp_path: Path, damage: str) -> None:
    compressed = gzip.compress(b"".join(f"line {n}\n".encode() for n in range(20_000)))
    flipped = bytearray(compressed)
    flipped[len(compressed) // 2] ^= 0xFF
    path = local(tmp_path / "a.gz")
    path.put_bytes({"truncated": compressed[:-100], "flipped": bytes(flipped), "no gzip": b"plain\n" * 50}[damage])
    with pytest.raises(UnreadableError):
        list(blocks(Part(0, path), 1 << 16))
    path.put_bytes(compressed + gzip.compress(b"another member\n"))
    assert sum(len(b) for b in blocks(Part(0, path), 1 << 16)) == 20_001


def values(text: Sequence[str | None], type_: str, zone: str = "UTC") -> list[object]:
    converted: list[object] = from_text(pa.array(text, pa.string()), type_, zone, None).to_pylist()
    return converted


@given(st.lists(st.one_of(st.none(), st.datetimes(datetime(1900, 1, 1), datetime(9000, 1, 1)))), st.integers(0, 3))
def test_timestamps_are_those_of_python(moments: list[datetime | None], form: int) -> None:
    def spelled(t: datetime | None) -> str | None:
        if t is None:
            return None
        text = t.isoformat(sep="T "[form % 2], timespec="auto" if form < 2 else "milliseconds")
        return text + ["", "Z", "+05:30", "-11:00"][form]

    texts = [spelled(t) for t in moments]
    offset = [timedelta(0), timedelta(0), timedelta(hours=5, minutes=30), timedelta(hours=-11)][form]
    cut = [t and t.replace(microsecond=t.microsecond // 1000 * 1000 if form > 1 else t.microsecond) for t in moments]
    expected = [None if t is None else t.replace(tzinfo=UTC) - offset for t in cut]
    assert values(texts, "timestamp") == expected


@given(
    st.lists(st.datetimes(datetime(1975, 1, 1), datetime(2030, 1, 1)).map(lambda t: t.replace(microsecond=0, fold=0)))
)
def test_local_times_are_those_of_the_zone(moments: list[datetime]) -> None:
    zone = ZoneInfo("Europe/Berlin")
    converted = values([t.isoformat() for t in moments], "timestamp", "Europe/Berlin")
    for t, value in zip(moments, converted, strict=True):
        instant = t.replace(tzinfo=zone).astimezone(UTC)
        exists = instant.astimezone(zone).replace(tzinfo=None) == t
        assert value == (instant if exists else None)


@given(
    st.lists(st.one_of(st.dates(date(1900, 1, 1), date(9000, 1, 1)).map(str), st.sampled_from(["2026-02-30", "x", ""])))
)
def test_dates_are_those_of_python(texts: list[str]) -> None:
    def parsed(text: str) -> date | None:
        try:
            return date.fromisoformat(text)
        except ValueError:
            return None

    assert values(texts, "date") == [parsed(t) for t in texts]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_json_numbers_become_the_float_of_their_text(numbers: list[float]) -> None:
    converted = from_json(pa.array(numbers, pa.float64()), "float", "UTC", None).to_pylist()
    for number, value in zip(numbers, converted, strict=True):
        if value is not None:
            assert struct.pack("f", value) == struct.pack("f", np.float32(repr(number)))
            assert math.isfinite(value)
    halfway = pa.array([(2**24 + 0.5) / 2**24, 1.5, -0.0], pa.float64())
    assert from_json(halfway, "float", "UTC", None).to_pylist()[1:] == [1.5, None]


def test_a_list_that_lost_an_element_is_null() -> None:
    lists = split_list(pa.array(["1|2", "", "3|x", None, "7"]), "|")
    converted = list_of(lists, from_text(lists.values, "int", "UTC", None), "array<int>")
    assert converted.to_pylist() == [[1, 2], None, None, None, [7]]


def test_equal_keys_have_equal_hashes() -> None:
    zeros = pa.array([0.0, -0.0, 1.5, None])
    hashes, keyed = key_hashes([pa.array(["a", "a", "b", "c"]), zeros])
    assert hashes[0] == hashes[1] != hashes[2]
    assert keyed.tolist() == [True, True, True, False]
    chunked, _ = key_hashes([pa.chunked_array([["a"], ["a", "b", "c"]]), zeros])
    assert chunked.tolist() == hashes.tolist()
    ints, _ = key_hashes([pa.array([1, 2], pa.int32())])
    longs, _ = key_hashes([pa.array([1, 2], pa.int64())])
    assert ints.tolist() == longs.tolist()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 2)), max_size=30))
def test_rows_are_left_out_by_their_places(
    tmp_path_factory: pytest.TempPathFactory, removed: list[tuple[int, int, int]]
) -> None:
    all_places = [(f, n, c) for f in range(4) for n in range(1, 10) for c in range(3)]
    columns = dict(zip(("_file", "_line", "_copy"), zip(*removed, strict=True), strict=True)) if removed else {}
    table = pa.table({n: pa.array(columns.get(n, []), pa.int64()) for n in ("_file", "_line", "_copy")})
    dropped = Dropped.save(table, local(tmp_path_factory.mktemp("dropped") / "dropped.npz")).load()
    files, lines, copies = (np.array(c) for c in zip(*all_places, strict=True))
    assert [r for r, keep in zip(all_places, rows_to_keep(dropped, files, lines, copies), strict=True) if keep] == [
        r for r in all_places if r not in removed
    ]


def test_a_data_file_has_delta_statistics(tmp_path: Path) -> None:
    types = {"n": pa.int32(), "x": pa.float64(), "s": pa.string(), "t": pa.timestamp("us", "UTC"), "d": pa.date32()}
    types |= {"l": pa.list_(pa.field("element", pa.int32())), "_source_file": pa.string(), "_source_line": pa.int64()}
    schema = pa.schema(list(types.items()))
    writer = DataFileWriter(local(tmp_path), "2026-03-01", schema, "zstd")
    moment = datetime(2026, 3, 1, 5, 6, 7, 123_456, UTC)
    rows = {
        "n": [3, None, -1],
        "x": [1.5, 2.5, None],
        "s": ["b" * 40, "a" * 40, None],
        "t": [moment, None, None],
        "d": [date(2026, 3, 1), date(2025, 1, 1), None],
        "l": [[1, None], None, []],
        "_source_file": ["in/a"] * 3,
        "_source_line": [1, 2, 3],
    }
    table = pa.Table.from_pydict(rows, schema=schema)
    for _ in range(2):
        writer.add(table)
    written = writer.close()
    assert written is not None
    stats = json.loads(written.add["stats"])
    assert (written.rows, stats["numRecords"]) == (6, 6)
    assert stats["nullCount"] == {n: 2 * table.column(n).null_count for n in schema.names}
    assert stats["minValues"] == {
        "n": -1,
        "x": 1.5,
        "s": "a" * 32,
        "t": "2026-03-01T05:06:07.123Z",
        "d": "2025-01-01",
        "_source_file": "in/a",
        "_source_line": 1,
    }
    assert (stats["maxValues"]["t"], stats["maxValues"]["s"]) == ("2026-03-01T05:06:07.124Z", "b" * 32 + "\U0010ffff")
    assert pq.read_table(tmp_path / written.path, partitioning=None).equals(pa.concat_tables([table, table]))
    assert written.add_action()["partitionValues"] == {"ds": "2026-03-01"}
    # Nothing without rows, and nothing of what was given up.
    assert DataFileWriter(local(tmp_path), "2026-03-02", schema, "snappy").close() is None
    other_writer = DataFileWriter(local(tmp_path), "2026-03-03", schema, "snappy")
    other_writer._waiting = [table]
    other_writer._flush()
    other_writer.abandon()
    assert list((tmp_path / "ds=2026-03-03").iterdir()) == []


def test_a_data_file_has_dictionaries_of_values_that_repeat(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    few_values, all_ = rng.integers(0, 50, 4_000), np.arange(4_000)
    rows = {
        "few": pa.array(few_values.astype(str)),
        "all": pa.array(all_.astype(str)),
        "n": pa.array(few_values),
        "m": pa.array(all_),
        "lists": pa.ListArray.from_arrays(np.arange(0, 4_001, 2), pa.array(few_values)).slice(0),
        "null": pa.nulls(4_000, pa.string()),
    }
    rows = {name: column if len(column) == 4_000 else pa.concat_arrays([column] * 2) for name, column in rows.items()}
    field = pa.field("lists", pa.list_(pa.field("element", pa.int64())))
    schema = pa.schema([field if n == "lists" else pa.field(n, c.type) for n, c in rows.items()])
    table = pa.table([c.cast(schema.field(n).type) for n, c in rows.items()], schema=schema)
    writer = DataFileWriter(local(tmp_path), "2026-03-01", schema, "snappy")
    writer.add(table)
    written = writer.close()
    assert written is not None
    assert pq.read_table(tmp_path / written.path, partitioning=None).equals(table)
    group = pq.read_metadata(tmp_path / written.path).row_group(0)
    columns = [group.column(k) for k in range(group.num_columns)]
    with_one = {c.path_in_schema for c in columns if c.has_dictionary_page}
    assert with_one >= {"few", "n", "lists.list.element"}
    assert not with_one & {"all", "m"}


PIECES = [
    "a",
    "é",
    " ",
    "\t",
    "\r",
    "\x01",
    '"',
    "{",
    "}",
    ":",
    ",",
    "[",
    "\ufeff",
    "N",
    "NaN",
    "Na",
    "I",
    "Inf",
    "-Inf",
]
PIECES += ["\\", "\\u", "\\ud8", "\\uD83D\\uDE00", "\\udc00"]


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), min_size=1, max_size=8))
def test_odd_lines_are_those_of_a_search_line_by_line(texts: list[str]) -> None:
    lines = ["{" + text + "}" for text in texts]
    block = LineBlock(("\n".join(lines) + "\n").encode(), 1)
    strange = [re.search(r"[\x00-\x08\x0b-\x1f]", line) is not None for line in lines]
    assert odd_bytes(block).tolist() == strange
    number, lone = r"[:,\[] *[-+]?(NaN|Inf)", r"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
    odd = [re.search(number, line) is not None or re.search(lone, line) is not None for line in lines]
    assert odd_json(block).tolist() == odd


@pytest.mark.parametrize(
    "value",
    [
        "1" * 1_001,
        # Jackson adds up the digits before and behind the point, and those of the exponent.
        "1" * 300 + "." + "1" * 850,
        "1." + "1" * 500 + "e" + "0" * 600 + "1",
        "[" * 500 + "]" * 500,
        pytest.param('"' + "x" * 20_000_001 + '"', id="text"),
    ],
)
def test_lines_with_more_than_jackson_reads_are_left_to_spark(value: str) -> None:
    block = LineBlock(f'{{"d": {value}}}\n{{"d": {"1" * 300}.{"1" * 400}}}\n'.encode(), 1)
    assert odd_json(block).tolist() == [True, False]
