"""Large bzip2 files as plain text in a load's folder, by many tasks: what is read then can be read in parts.

A task decompresses the blocks that begin in its range of bytes, and writes the whole lines among them. Lines that begin
in one range and end in another are put together by the driver. So each line's number is known, and no block is
decompressed twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pyspark.sql import SparkSession

from headrace.lake.blocks.bzip2 import Checksums, check, decompressed
from headrace.lake.blocks.lines import Part, UnreadableError
from headrace.lake.spark.tasks import run_tasks
from headrace.storage import Location, StoreAway

#: Smaller files are read by one task; larger ones by tasks of about so many bytes, at most of so many.
LEAST_BYTES, _MOST_RANGE_BYTES = 4 << 20, 16 << 20
_TASKS_A_CORE = 4
#: A line that is longer than this and is cut by a range keeps its file from being split.
_MOST_CUT = 4 << 20


@dataclass(frozen=True)
class Piece:
    """What a range holds. JSON values."""

    #: The whole lines: name of a file in the folder, bytes, and how many they are.
    name: str
    size: int
    lines: int
    #: What is before the first line feed, with it, and what is behind the last; in Latin-1. A range without a line feed
    #: is all `head`.
    head: str
    tail: str
    checksums: list[tuple[bool, int]]


@dataclass(frozen=True)
class UnpackTask:
    """Decompresses ranges of files; yields a Piece, or `unreadable`: why not."""

    #: (file, first byte, last byte).
    ranges: tuple[tuple[Location, int, int], ...]
    folder: Location

    def __call__(self, number: int) -> Iterator[dict[str, Any]]:
        path, start, end = self.ranges[number]
        place = self.folder / f"plain-{uuid.uuid4()}"
        try:
            yield asdict(self._unpack(path, start, end, place))
        except StoreAway:  # nothing is known of the file
            raise
        except (UnreadableError, OSError) as e:
            yield {"unreadable": str(e)}

    def _unpack(self, path: Location, start: int, end: int, place: Location) -> Piece:
        checksums = Checksums([])
        # Of the first range the first line, too, is whole.
        head, tail, size, lines, inside = b"", b"", 0, 0, start == 0
        with place.new_file() as plain, plain.open("wb") as out:
            for text in decompressed(path, start, end, checksums):
                if not inside:
                    cut = text.find(b"\n") + 1
                    head += text[:cut] if cut else text
                    inside, text = bool(cut), text[cut:] if cut else b""
                cut = text.rfind(b"\n") + 1
                if cut:
                    out.write(tail)
                    out.write(memoryview(text)[:cut])
                    size, lines = size + len(tail) + cut, lines + text.count(b"\n")
                    tail = b""
                tail += text[cut:]
                if max(len(head), len(tail)) > _MOST_CUT:
                    raise UnreadableError(f"{path}: a line of more than {_MOST_CUT:,} bytes")
        return Piece(place.name, size, lines, head.decode("latin-1"), tail.decode("latin-1"), checksums.found)


def unpack(
    spark: SparkSession | None, files: Mapping[int, tuple[Location, int]], cores: int, folder: Location
) -> dict[int, list[Part]]:
    """Parts of plain text in a folder, by file; those that cannot be read in ranges are not among them.

    Args:
        spark: None: tasks run here.
        files: by number: place and bytes of bzip2 files.
        cores: tasks that run at once.
        folder: seen by all executors.
    """
    most = max(LEAST_BYTES, min(_MOST_RANGE_BYTES, sum(size for _, size in files.values()) // (_TASKS_A_CORE * cores)))
    ranges: list[tuple[int, Location, int, int]] = []
    for number, (path, size) in files.items():
        count = -(-size // most)
        edges = [size * k // count for k in range(count + 1)]
        ranges += [(number, path, a, b) for a, b in pairwise(edges)]
    task = UnpackTask(tuple((path, a, b) for _, path, a, b in ranges), folder)
    pieces: dict[int, list[dict[str, Any]]] = {}
    for (number, *_), found in zip(ranges, run_tasks(spark, len(ranges), task), strict=True):
        pieces.setdefault(number, []).append(found)
    parts = {}
    for number, found in pieces.items():
        try:
            parts[number] = _joined(number, files[number][0], found, folder)
        except UnreadableError:
            # What is wrong with it, and where, is found by whoever reads it from its beginning.
            for one in found:
                if "name" in one:
                    (folder / one["name"]).remove_quietly()
    return parts


def _joined(number: int, path: Location, found: Sequence[Mapping[str, Any]], folder: Location) -> list[Part]:
    """Parts of one file, in its order: the lines of the ranges, and between them those that were cut."""
    for one in found:
        if "unreadable" in one:
            raise UnreadableError(one["unreadable"])
    pieces = [Piece(**one) for one in found]
    check(((is_stream, checksum) for piece in pieces for is_stream, checksum in piece.checksums), path)
    parts: list[Part] = []
    line, cut = 1, b""

    def add_cut() -> None:
        nonlocal line, cut
        place = folder / f"plain-{uuid.uuid4()}"
        place.transient().put_bytes(cut)
        parts.append(Part(number, place, 0, len(cut), line))
        line, cut = line + 1, b""

    for piece in pieces:
        cut += piece.head.encode("latin-1")
        if cut.endswith(b"\n"):
            add_cut()
        if piece.size:
            parts.append(Part(number, folder / piece.name, 0, piece.size, line))
            line += piece.lines
        cut += piece.tail.encode("latin-1")
    if cut:
        add_cut()
    return parts
