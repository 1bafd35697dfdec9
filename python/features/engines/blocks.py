"""Arrow tables in blocks of a few MiB, as they travel through Spark's shuffle (headrace.lake.spark.exchange)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.lake.spark.exchange import BLOCK_BYTES, Block, Payload

#: In a schema's metadata: which table it is.
_NAME = b"name"


def cut(table: pa.Table, most: int = BLOCK_BYTES) -> Iterator[pa.Table]:
    """A table in even slices of about `most` bytes or less; one without rows as it is."""
    slices = max(1, min(table.num_rows, -(-table.nbytes // most)))
    for i in range(slices):
        start, end = (table.num_rows * k // slices for k in (i, i + 1))
        yield table.slice(start, end - start)


def packed(table: pa.Table, name: int, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """A table, its number and metadata as an Arrow stream."""
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata({_NAME: str(name).encode(), **(metadata or {})})
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def unpacked(payload: Payload) -> Iterator[tuple[int, pa.Table]]:
    """Tables that `packed` made, one behind the other, and their numbers. They are views of the payload."""
    source = pa.BufferReader(payload)
    while source.tell() < source.size():
        table = pa.ipc.open_stream(source).read_all()
        yield int(table.schema.metadata[_NAME]), table


@dataclass
class Sender:
    """Collects tables for partitions, and gives them as blocks."""

    source: int
    #: What all partitions together may hold back.
    most: int = 8 * BLOCK_BYTES
    _numbers: int = 0
    _waiting: dict[int, list[bytes]] = field(default_factory=dict)
    _size: int = 0

    def add(self, partition: int, name: int, table: pa.Table) -> Iterator[Block]:
        """Send a table; the blocks that are full."""
        for part in cut(table):
            data = packed(part, name)
            self._waiting.setdefault(partition, []).append(data)
            self._size += len(data)
            if self._size >= self.most:
                yield from self.rest()

    def rest(self) -> Iterator[Block]:
        """What is left."""
        for partition, mine in sorted(self._waiting.items()):
            for payload in _joined(mine):
                yield self.block(partition, payload)
        self._waiting, self._size = {}, 0

    def block(self, partition: int, payload: bytes) -> Block:
        """A block of its own."""
        self._numbers += 1
        return Block(partition, self.source, self._numbers, payload)


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Streams behind each other, as long as they are about a block."""
    mine, size = list[bytes](), 0
    for part in parts:
        if mine and size + len(part) > BLOCK_BYTES:
            yield b"".join(mine)
            mine, size = [], 0
        mine.append(part)
        size += len(part)
    if mine:
        yield b"".join(mine)
