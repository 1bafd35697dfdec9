"""Hostile text in landing files: work stays linear, and lone surrogates are counted."""

from __future__ import annotations

import io
import json
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.lake.landing.blocks import LINE_BYTES, TOO_LONG, LineBlock, odd_json, whole_lines
from headrace.lake.landing.delimited import UNCLOSED, QuotedFields, lines_of, whole_records
from headrace.lake.landing.exact_casts import columns_with_halves, without_halves
from headrace.lake.landing.files import LandingFile
from headrace.lake.landing.formats import header_of
from headrace.storage import local

TOKENS = ('"', '""', ",", "x", " ", "\n", '"\n', ',"', '",', '5" pipe,"z\n', '"a"b,"\n', 'é,"', "\r\n")
PATTERNS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=12).map("".join)


class Calls:
    """Calls of functions, of Python and of C, that a block of code makes."""

    def __init__(self) -> None:
        self.count = 0

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")

    @contextmanager
    def counted(self) -> Iterator[None]:
        previous = sys.getprofile()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(previous)


def records(data: bytes, fields: QuotedFields, most: int, block: int = 64) -> list[tuple[str, str | None]]:
    """(text, fault) of each line, by the code under test."""
    pairs: list[tuple[str, str | None]] = []
    for part in whole_records(lines_of(io.BytesIO(data), block), fields, most):
        pairs += zip(part.texts.to_pylist(), part.faults.to_pylist(), strict=True)
    return pairs


def ends_inside(line: str, inside: bool, trim: bool) -> bool:
    """Return whether a line ends within a quoted field: RFC 4180, character by character."""
    state, i = "quoted" if inside else "start", 0
    while i < len(line):
        c = line[i]
        if state == "quoted":
            if c == '"' and line[i + 1 : i + 2] == '"':
                i += 1
            elif c == '"':
                state = "behind"
        elif c == ",":
            state = "start"
        elif state == "start" and c == '"':
            state = "quoted"
        elif not (state == "start" and trim and c == " "):
            state = "behind"
        i += 1
    return state == "quoted"


def expected(data: bytes, fields: QuotedFields, most: int) -> list[tuple[str, str | None]]:
    """The same by a search from each line on, however long it takes."""
    lines = data.decode().split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    pairs: list[tuple[str, str | None]] = []
    i = 0
    while i < len(lines):
        last, inside, size = i, ends_inside(lines[i], False, fields.trim), len(lines[i].encode()) + 1
        while inside and size <= most and last + 1 < len(lines):
            last += 1
            inside, size = ends_inside(lines[last], True, fields.trim), size + len(lines[last].encode()) + 1
        if inside:
            pairs.append((lines[i], UNCLOSED))
            i += 1
        else:
            pairs += [("\n".join(lines[i : last + 1]), None), *[("", None)] * (last - i)]
            i = last + 1
    return pairs


@given(st.lists(PATTERNS, max_size=8).map("".join), st.integers(1, 60), st.integers(1, 40), st.booleans())
def test_records_are_those_of_a_search_from_each_line(text: str, most: int, block: int, trim: bool) -> None:
    fields = QuotedFields(",", trim)
    assert records(text.encode(), fields, most, block) == expected(text.encode(), fields, most)


@settings(max_examples=40)
@given(PATTERNS, st.sampled_from([60, 1000, 1 << 20]), st.booleans())
def test_work_of_joining_records_grows_with_their_bytes(pattern: str, most: int, trim: bool) -> None:
    """Any repeated pattern costs at most 12 calls a byte, however often it comes."""
    for times in (60, 240, 960):
        data = (pattern * times).encode()
        calls = Calls()
        with calls.counted():
            records(data, QuotedFields(",", trim), most, 4096)
        assert calls.count <= 2000 + 12 * len(data)


@pytest.mark.parametrize("line", [b'5" pipe,"z\n', b'"\n', b'x,"\n', b'"x\n'])
def test_forty_kilobytes_of_open_quotes(line: bytes) -> None:
    """The reported file: its time was 53 seconds, and grew with the square of its lines."""
    data = line * (44_000 // len(line))
    calls = Calls()
    with calls.counted():
        pairs = records(data, QuotedFields(","), 1 << 20, 1 << 22)
    assert len(pairs) == data.count(b"\n")
    assert calls.count < 10 * len(data)


class Elements:
    """Elements that operations of NumPy on arrays have gone over."""

    count = 0


class Counted(np.ndarray):  # type: ignore[type-arg]
    """An array that counts what is done with it and what comes of it."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(x) if isinstance(x, Counted) else x for x in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        Elements.count += max(np.size(result), *(np.size(x) for x in plain))
        return result.view(Counted) if isinstance(result, np.ndarray) else result

    def __getitem__(self, key: Any) -> Any:
        result = np.asarray(self)[np.asarray(key) if isinstance(key, Counted) else key]
        Elements.count += np.size(result)
        return result.view(Counted) if isinstance(result, np.ndarray) else result


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([b"a", b"\r", b"\r" * 50, b"\n", b"a\r\n", b"\r\r\n", b"x,y\n" * 20]), max_size=30),
    st.integers(0, 2000),
)
def test_work_of_finding_line_ends_grows_with_their_bytes(tokens: list[bytes], returns: int) -> None:
    data = b"".join(tokens) + b"\r" * returns + b"\n"
    block = LineBlock(data, 1)
    for name in ("bytes", "starts", "newlines"):
        setattr(block, name, getattr(block, name).view(Counted))
    Elements.count = 0
    ends = np.asarray(block.ends)
    assert Elements.count <= 40 * len(data)
    lines = [data[a:b] for a, b in zip(np.asarray(block.starts).tolist(), ends.tolist(), strict=True)]
    assert lines == [line.rstrip(b"\r") for line in data.split(b"\n")[:-1]]


@given(
    st.lists(st.sampled_from([b"\n", b"a", b"bc" * 7, "é".encode() * 9, b"x" * 40]), max_size=12).map(b"".join),
    st.integers(1, 16),
)
def test_lines_that_are_too_long_keep_their_beginning(data: bytes, size: int) -> None:
    most = 20
    texts, count = list[tuple[bytes, bool]](), 0
    for part in whole_lines(io.BytesIO(data).read, size, most):
        assert part.data.endswith(b"\n")
        assert part.data.count(b"\n") == 1 or not part.too_long
        texts += [(line, part.too_long) for line in part.data[:-1].split(b"\n")]
        count += part.bytes
    lines = data.split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    assert count == len(data)
    assert [too_long for _, too_long in texts] == [len(line) > most for line in lines]
    for (text, too_long), line in zip(texts, lines, strict=True):
        assert line == text or (too_long and len(text) > most and line.startswith(text))


def stream_of(line_bytes: int, lines: int) -> Callable[[int], bytes]:
    """A text that is nowhere as a whole."""
    left = line_bytes * lines

    def read(size: int) -> bytes:
        nonlocal left
        n = min(size, left % line_bytes or line_bytes, left)
        left -= n
        return b"y" * (n - 1) + b"\n" if n and left % line_bytes == 0 else b"y" * n

    return read


@pytest.mark.parametrize(("line_bytes", "lines"), [(20 * LINE_BYTES, 1), (2 * LINE_BYTES, 8)])
def test_memory_does_not_grow_with_the_longest_line(line_bytes: int, lines: int) -> None:
    """Read a gzip bomb of 320 MiB of one letter, and one of eight lines: 4,096 bytes are kept of each."""
    tracemalloc.start()
    try:
        summaries = [(len(x.data), x.bytes, x.too_long) for x in whole_lines(stream_of(line_bytes, lines), 4 << 20)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert summaries == [(4097, line_bytes, True)] * lines
    assert peak < LINE_BYTES + 5 * (4 << 20)


def test_a_line_that_is_too_long_stands_on_its_own_and_ends_an_open_record() -> None:
    data = b'1,"open\n2,b\n' + b"y" * (LINE_BYTES + 1) + b'\n4,"c\nd"\n'
    pairs = records(data, QuotedFields(","), 1 << 20, 1 << 22)
    assert [fault for _, fault in pairs] == [UNCLOSED, None, TOO_LONG, None, None]
    assert [text[:8] for text, _ in pairs] == ['1,"open', "2,b", "y" * 8, '4,"c\nd"', ""]


@pytest.mark.parametrize(
    ("data", "multiline", "message"),
    [
        (b"z" * 200_000 + b",id\n1,2\n", False, "its first line is no header: field larger than field limit"),
        (b"QUJD" * 100_000, False, "its first line is no header: field larger than field limit"),
        (b"y," * (1 << 20), False, "its first line is no header: it has more than 1,048,576 bytes"),
        (b'id,"note\n' + b"1,2\n" * 100_000, True, "its first line is no header: a quoted field is not closed"),
        (b"id,note\r1,a\r2,b\r", False, "its lines end with a carriage return alone, as on old Macs"),
        (b"id,note\r1,a\r2,b\r", True, "its lines end with a carriage return alone, as on old Macs"),
        (b"id,note\r" + b"1,a\r" * 500_000, False, "more than 1,048,576 bytes; it has carriage returns"),
    ],
)
def test_a_header_that_is_none_is_refused_by_name(data: bytes, multiline: bool, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    file = LandingFile("in/a.csv", local(tmp_path / "a.csv"), len(data), 0)
    with pytest.raises(UserError, match=rf"^landing file in/a\.csv: .*{message}"):
        header_of(file, QuotedFields(","), multiline=multiline)


def test_a_header_of_very_many_columns(tmp_path: Path) -> None:
    names = [f"c{k}" for k in range(100_000)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\r\n")
    assert header_of(LandingFile("a.csv", local(tmp_path / "a.csv"), 0, 0), QuotedFields(",")) == tuple(names)


def test_numbers_of_nearly_the_longest_kind_are_searched_once() -> None:
    line = b'{"a": [' + (b"1" * 899 + b",") * 20_000 + b"1]}\n"
    odd = odd_json(LineBlock(line + line.replace(b"1,1", b"111", 1), 1))
    assert odd.tolist() == [False, True]


UNITS = st.sampled_from(["\ud83d", "\ude00", "\U0001f600", "\\", "u", "d83d", '"', "a", "é"])
TEXT = st.lists(UNITS, max_size=8).map("".join)


def decoded(text: str) -> str:
    """Return a text as JSON's reader has it: halves that stand beside each other are a pair."""
    read: str = json.loads(json.dumps(text))
    return read


@given(st.dictionaries(st.sampled_from(["a", "B", "c"]), TEXT), TEXT)
def test_each_half_is_a_replacement_character(row: dict[str, str], inner: str) -> None:
    line = json.dumps(row | {"o": {"In": [inner]}}).encode()
    parsed = json.loads(without_halves(line))
    for key, text in row.items():
        assert parsed[key] == re.sub("[\ud800-\udfff]", "\ufffd", decoded(text))
    has_surrogate = {key: re.search("[\ud800-\udfff]", decoded(text)) is not None for key, text in row.items()}
    expected = [
        has_surrogate.get("a", False),
        has_surrogate.get("B", False),
        re.search("[\ud800-\udfff]", decoded(inner)) is not None,
    ]
    assert columns_with_halves(line, [("a",), ("b",), ("o", "in")]) == [
        i for i, has_half in enumerate(expected) if has_half
    ]
