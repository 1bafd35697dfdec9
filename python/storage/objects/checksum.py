"""The checksum of a file's content: CRC-32, as zlib and x-amz-checksum-crc32 have it, which costs a read of memory."""

from __future__ import annotations

import zlib
from pathlib import Path

_BLOCK = 1 << 20


def crc32_of(content: bytes | Path) -> str:
    """Return the CRC-32 of bytes or of a local file, as 8 hexadecimal digits."""
    if isinstance(content, bytes):
        return f"{zlib.crc32(content):08x}"
    crc = 0
    with open(content, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"
