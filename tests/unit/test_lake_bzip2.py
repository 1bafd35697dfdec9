"""bzip2 files by ranges of their bytes, beside the standard library's reading of the whole."""

from __future__ import annotations

import bz2
import random
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.lake.landing import compression
from headrace.lake.landing.blocks import Part, blocks
from headrace.storage import Location, local
from tests.storage_support import memory_home

pytestmark = pytest.mark.filterwarnings("error")


def text_of(seed: int, size: int, longest: int, last_ends: bool) -> bytes:
    """Lines of all lengths, of bytes that compress a little, badly, or to nothing."""
    rng = random.Random(seed)
    lines, length = [], 0
    while length < size:
        n = rng.randrange(longest + 1)
        lines.append(rng.choice([rng.randbytes(n).replace(b"\n", b" "), bytes(rng.choices(b"abc\r,", k=n)), b"7" * n]))
        length += n + 1
    return b"\n".join(lines) + (b"\n" if last_ends else b"x")


def written(folder: Path, streams: list[bytes]) -> tuple[Location, int]:
    path = folder / "x.csv.bz2"
    path.write_bytes(b"".join(streams))
    return local(path), path.stat().st_size


def by_ranges(file: tuple[Location, int], scratch: Path) -> list[Part] | None:
    scratch.mkdir(exist_ok=True)
    plain = compression.unpack(None, {3: file}, 1, local(scratch)).get(3)
    return None if plain is None else parts_of(plain)


def parts_of(plain: list[compression.PlainLines]) -> list[Part]:
    return [Part(3, lines.path, 0, lines.size, lines.first_line) for lines in plain]


def lines_of(parts: list[Part]) -> list[tuple[int, bytes]]:
    """(number, line) of each line, by the reader of plain text."""
    numbered = []
    for part in parts:
        for block in blocks(part, 1 << 16):
            texts = block.lines.to_pylist()
            numbered += [(block.first_line + k, line.removesuffix(b"\n")) for k, line in enumerate(texts)]
    return numbered


@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 350_000), min_size=1, max_size=3),
    longest=st.sampled_from([5, 300, 90_000]),
    last_ends=st.booleans(),
    level=st.sampled_from([1, 2, 9]),
    most=st.sampled_from([1, 7_001, 60_000, 1 << 20]),
)
@settings(max_examples=25, deadline=None)
def test_ranges_hold_the_lines_of_the_whole(
    seed: int,
    sizes: list[int],
    longest: int,
    last_ends: bool,
    level: int,
    most: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("bz2")
    texts = [text_of(seed + k, size, longest, last_ends) for k, size in enumerate(sizes)]
    content = b"".join(texts)
    file = written(folder, [bz2.compress(text, level) for text in texts])
    with pytest.MonkeyPatch.context() as patch:
        # No more than a few hundred ranges.
        most = max(most, file[1] // 200)
        patch.setattr(compression, "LEAST_BYTES", most)
        patch.setattr(compression, "_MOST_RANGE_BYTES", most)
        parts = by_ranges(file, folder / "scratch")
    assert parts is not None
    expected = content.removesuffix(b"\n").split(b"\n")
    assert lines_of(parts) == list(enumerate(expected, 1))


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "LEAST_BYTES", 20_000)
    monkeypatch.setattr(compression, "_MOST_RANGE_BYTES", 20_000)


TEXT = text_of(5, 400_000, 200, True)


def opens(data: bytes) -> bool:
    try:
        bz2.decompress(data)
    except (OSError, ValueError):
        return False
    return True


@pytest.mark.usefixtures("small_ranges")
def test_damaged_files_are_not_read_in_ranges(tmp_path: Path) -> None:
    good, rng = bz2.compress(TEXT, 1), random.Random(1)
    assert by_ranges(written(tmp_path, [good]), tmp_path / "s") is not None
    for _ in range(25):
        damaged = bytearray(good)
        damaged[rng.randrange(4, len(good) - 1)] ^= 1 << rng.randrange(8)
        assert not opens(bytes(damaged))
        assert by_ranges(written(tmp_path, [bytes(damaged)]), tmp_path / "bad") is None
    for cut in (1, 5, 11, len(good) // 2, len(good) - 2):
        assert by_ranges(written(tmp_path, [good[:-cut]]), tmp_path / "bad") is None
    assert by_ranges(written(tmp_path, [good, b"and more"]), tmp_path / "bad") is None
    assert by_ranges(written(tmp_path, [TEXT]), tmp_path / "bad") is None
    assert list((tmp_path / "bad").iterdir()) == []


@pytest.mark.usefixtures("small_ranges")
def test_pieces_in_a_store_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, good = memory_home(monkeypatch, tmp_path / "cache"), bz2.compress(TEXT, 1)
    parts = parts_of(compression.unpack(None, {3: written(tmp_path, [good])}, 1, lake)[3])
    assert len(parts) > 3
    assert lines_of(parts) == list(enumerate(TEXT.removesuffix(b"\n").split(b"\n"), 1))
    stored_files = list(lake.files())
    assert compression.unpack(None, {3: written(tmp_path, [good[:-9]])}, 1, lake) == {}
    assert list(lake.files()) == stored_files


@pytest.mark.usefixtures("small_ranges")
def test_missing_blocks_and_streams_are_noticed(tmp_path: Path) -> None:
    """Each block is whole, and one of them is gone: the stream's checksum says so."""
    good = bz2.compress(TEXT, 1)
    offsets = [mark.bit for mark in compression.bzip2_marks(good)]
    bits = "".join(f"{byte:08b}" for byte in good)
    shortened = bits[: offsets[1]] + bits[offsets[2] :]
    short = int(shortened.ljust(-(-len(shortened) // 8) * 8, "0"), 2).to_bytes(-(-len(shortened) // 8), "big")
    assert len(offsets) > 3
    assert by_ranges(written(tmp_path, [good]), tmp_path / "s") is not None
    assert by_ranges(written(tmp_path, [short]), tmp_path / "s") is None


@pytest.mark.usefixtures("small_ranges")
def test_a_line_of_many_ranges_is_one_line(tmp_path: Path) -> None:
    line = random.Random(2).randbytes(700_000).replace(b"\n", b"")
    text = b"first\n" + line + b"\nlast"
    file = written(tmp_path, [bz2.compress(text, 1)])
    assert lines_of(by_ranges(file, tmp_path / "s") or []) == [(1, b"first"), (2, line), (3, b"last")]


def test_arrow_reads_whole_files_of_several_streams(tmp_path: Path) -> None:
    """Arrow's own reader, which takes small files, reads them to the end."""
    path, _ = written(tmp_path, [bz2.compress(b"a\nb"), bz2.compress(b"c\nd\n")])
    assert lines_of([Part(0, path)]) == [(1, b"a"), (2, b"bc"), (3, b"d")]
    assert pa.Codec.is_available("bz2")
