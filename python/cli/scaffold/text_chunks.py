"""Text of files, plain or compressed: a part of each where files are large, and commands that make them readable."""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import UserError
from headrace.lake.landing.compression import DamagedError, ending, open_plain
from headrace.storage import Location, StoreError
from headrace.storage.store import Info

#: Bytes of text that are looked at, over all files, and the files that they are from.
SAMPLE_BYTES, SAMPLE_FILES = 32 << 20, 8
#: Bytes whose compression tells that of the rest.
_PROBE = 1 << 20
#: Marks that UTF-16 text begins with.
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
NEW_LINE = b"\n"
#: How a shell reads a compressed file.
_DECOMPRESS = {".gz": "gzip -dc", ".bz2": "bzip2 -dc", ".zst": "zstd -dc"}


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one file."""

    file: Location
    #: The file's first bytes, decompressed, up to the end of a line.
    head: bytes
    #: The end of a large file: whole lines.
    tail: bytes
    #: Bytes of the file, compressed or not, that `head` and `tail` are.
    read_bytes: int
    is_complete: bool

    def lines(self) -> list[bytes]:
        return (self.head + self.tail).splitlines()

    def numbered_lines(self) -> list[str]:
        """Return the first lines, blank ones too, without a byte order mark."""
        begin = self.head[: 1 << 18].decode("utf-8-sig", errors="ignore")
        return begin.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    def first_lines(self, text: str) -> list[str]:
        """Return up to 200 lines that are not blank.

        Args:
            text: what the user has given, for the message.

        Raises:
            UserError: there are none.
        """
        lines = [line for line in self.numbered_lines() if line.strip()]
        if not lines:
            raise UserError(f"{text}: {self.file.name} is empty: there is nothing to look at")
        return lines[:200]

    def check_encoding(self, text: str) -> None:
        """Check that the file is UTF-8 text with line feeds.

        Args:
            text: what the user has given, for the message.

        Raises:
            UserError: it is not; has the command that makes it so.
        """
        name = f"{text}: {self.file.name}"
        if self.head.startswith(UTF_16):
            raise UserError(f"{name} is UTF-16 text: {rewritten(self.file, 'iconv -f UTF-16 -t UTF-8')}")
        for part in (self.head, self.tail):
            try:
                part.decode()
            except UnicodeDecodeError as e:
                place = f"line {part.count(NEW_LINE, 0, e.start) + 1:,}" if part is self.head else "near its end"
                raise UserError(
                    f"{name} is not UTF-8 text ({place}). If Windows wrote it, or it is Latin-1: "
                    f"{rewritten(self.file, 'iconv -f WINDOWS-1252 -t UTF-8')}"
                ) from None
        if b"\r" in self.head and NEW_LINE not in self.head:
            mended = rewritten(self.file, r"tr '\r' '\n'")
            raise UserError(f"{name}: its lines end in a carriage return alone, as on old Macs: {mended}")


def sample_bytes(files: Mapping[Location, Info]) -> list[Chunk]:
    """Return lines of up to SAMPLE_FILES files, evenly from the first to the last. Of a store no more is fetched.

    Raises:
        UserError: a file cannot be read.
    """
    total, chosen = sum(info.size for info in files.values()), list(files)
    if total > SAMPLE_BYTES and len(files) > SAMPLE_FILES:
        step = (len(files) - 1) / (SAMPLE_FILES - 1)
        chosen = [chosen[round(i * step)] for i in range(SAMPLE_FILES)]
    each = SAMPLE_BYTES // len(chosen) if total > SAMPLE_BYTES else SAMPLE_BYTES
    try:
        return [_chunk(file, files[file].size, each) for file in chosen]
    except StoreError:  # which says nothing of the file
        raise
    except (OSError, DamagedError) as e:
        raise UserError(f"cannot be read: {e}") from None


def _chunk(file: Location, size: int, most: int) -> Chunk:
    if ending(file.name):
        with open_plain(file) as data:
            head = data.read(most + 1)
        if len(head) <= most:
            return Chunk(file, head, b"", size, True)
        # How many bytes of the file these are is not known: as zlib would do it.
        used = round(len(head) * len(zlib.compress(head[:_PROBE])) / len(head[:_PROBE]))
        return Chunk(file, whole_lines(head), b"", min(used, size), False)
    if size <= most:
        with file.open() as raw:
            return Chunk(file, raw.read(size), b"", size, True)
    with file.open_parts() as raw:
        # Files are mostly in the order of time: the end says until when.
        head = whole_lines(raw.read(most * 3 // 4))
        raw.seek(size - most // 4)
        tail = raw.read(most // 4).partition(b"\n")[2]
    return Chunk(file, head, tail, len(head) + len(tail), False)


def whole_lines(data: bytes) -> bytes:
    """Return bytes up to the end of the last line."""
    return data[: data.rfind(b"\n") + 1]


def rewritten(file: Location, program: str) -> str:
    """Return the commands that pass a file through a program, and that look at what comes out."""
    suffix, quoted = ending(file.name), shlex.quote(str(file))
    target = "clean_" + file.name.removesuffix(suffix)
    run = f"{program} < {quoted}"
    if suffix:
        run = f"{_DECOMPRESS.get(suffix, 'cat')} {quoted} | {program}"
    return f"{run} > {shlex.quote(target)} && headrace init {shlex.quote(target)}"
