"""Text without the JVM: compressed files, lines, and records that go over several of them."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.landing.compression import DamagedError, open_plain
from headrace.lake.landing.delimited import UNCLOSED, QuotedFields, lines_of, whole_records
from headrace.storage import local

FIELD = st.text(alphabet='ab,"\n é', max_size=6)
ROWS = st.lists(st.lists(FIELD, min_size=2, max_size=3), max_size=12)


def hadoop_snappy(data: bytes, block: int = 1000, chunk: int = 300) -> bytes:
    """Frame data as Hadoop's BlockCompressorStream does."""
    codec, out = pa.Codec("snappy"), b""
    for start in range(0, len(data), block):
        raw_block = data[start : start + block]
        out += struct.pack(">I", len(raw_block))
        for k in range(0, len(raw_block), chunk):
            part = codec.compress(raw_block[k : k + chunk]).to_pybytes()
            out += struct.pack(">I", len(part)) + part
    return out


def zstandard(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data).to_pybytes())


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard, ".snappy": hadoop_snappy, "": bytes}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files(ending: str, tmp_path: Path) -> None:
    """Whole, of several members, and cut anywhere: what is cut is noticed, whatever is left."""
    random = np.random.default_rng(3)
    data = bytes(random.integers(97, 101, 5_000, dtype=np.uint8))
    path = tmp_path / f"x{ending}"

    def read(body: bytes) -> bytes:
        path.write_bytes(body)
        with open_plain(local(path)) as stream:
            return stream.read()

    body = COMPRESS[ending](data)
    assert read(body) == data
    assert read(body + body) == data + data
    assert read(COMPRESS[ending](b"")) == b""
    if not ending:
        return
    for cut in {1, 3, *random.integers(1, len(body), 20).tolist()}:
        path.write_bytes(body[:cut])
        left = b""
        with contextlib.suppress(DamagedError), open_plain(local(path)) as stream:
            left = stream.read()
        # A cut between two blocks of Snappy leaves a whole file: its format has no end.
        assert not left or (ending == ".snappy" and data.startswith(left) and len(left) % 1000 == 0)
    garbage = bytearray(body)
    garbage[len(body) // 2 :] = bytes(len(body) - len(body) // 2)
    with pytest.raises(DamagedError, match=r"damaged|truncated"):
        read(bytes(garbage))


@given(st.binary(max_size=60), st.integers(1, 7))
def test_lines(data: bytes, block: int) -> None:
    lines = [line for x in lines_of(io.BytesIO(data), block) for line in x.texts.view(pa.binary()).to_pylist()]
    expected = data.split(b"\n")
    assert lines == (expected[:-1] if expected[-1] == b"" else expected)


def joined(data: bytes, block: int, most: int = 1 << 20, trim: bool = False) -> tuple[list[str], list[int]]:
    """Lines, and the places of those that are unclosed."""
    texts: list[str] = []
    unclosed: list[int] = []
    for batch in whole_records(lines_of(io.BytesIO(data), block), QuotedFields(",", trim), most):
        unclosed += [len(texts) + i for i, fault in enumerate(batch.faults.to_pylist()) if fault == UNCLOSED]
        texts += batch.texts.to_pylist()
    return texts, unclosed


@given(ROWS, st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), st.integers(1, 50))
def test_records_are_those_of_the_csv_module(rows: list[list[str]], quoting: int, block: int) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(rows)  # type: ignore[arg-type]
    reader = csv.reader(io.StringIO(text.getvalue(), newline=""))
    starts, parsed = [], []
    line = 0
    for row in reader:
        starts.append(line)
        parsed.append(row)
        line = reader.line_num
    texts, unclosed = joined(text.getvalue().encode(), block)
    assert parsed == rows
    assert unclosed == []
    assert len(texts) == text.getvalue().count("\n")
    assert [next(csv.reader(io.StringIO(texts[s], newline=""))) for s in starts] == rows
    assert all(t == "" for i, t in enumerate(texts) if i not in starts)


def test_a_quote_that_is_not_closed_costs_one_line() -> None:
    lines = ["1,x", '2,"open', '3,"a', 'b"', "4,y", '5,"last']
    texts, unclosed = joined("\n".join(lines).encode(), 4)
    # The quote of line 2 is closed by that of line 3, in the middle of a field; what follows is read as it stands.
    assert (texts[1], unclosed) == ('2,"open\n3,"a', [5])
    lines = ["1,x", '2,"open', "3,a", "4,y"]
    assert joined("\n".join(lines).encode(), 4) == (lines, [1])
    # More than the longest record: given up as soon as it is.
    lines = ['1,"open', *(f"{i},z" for i in range(2, 9)), '9,"q', 'r"']
    assert joined("\n".join(lines).encode(), 4, most=12) == ([*lines[:8], '9,"q\nr"', ""], [0])


def test_blanks_before_a_quote_where_fields_are_trimmed() -> None:
    data = b'1, "x\ny"\n'
    assert joined(data, 64, trim=True) == (['1, "x\ny"', ""], [])
    assert joined(data, 64) == (['1, "x', 'y"'], [])
