"""Proxy before a store that answers 503 in its place while a file is there.

    python -m bench.rack.outage HOST PORT TARGET_PORT FILE

FILE is JSON: {} for all requests while it is there; `containing`: only those whose first line has that text; `times`:
only so many. Each request that is refused is a line of the output. Plain HTTP of S3's clients: a request has no body or
says its length.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

_XML = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_BLOCK = 1 << 16


class Outage:
    """A server that hands requests on to another one at the same address.

    Args:
        host: where both listen.
        target_port: of the other.
        file: says whether there is an outage.
    """

    def __init__(self, host: str, target_port: int, file: Path) -> None:
        self._host, self._target_port, self._file = host, target_port, file
        self._refused = 0

    async def serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """Serve one connection of a client's."""
        server: asyncio.StreamWriter | None = None
        answer_task: asyncio.Task[None] | None = None
        try:
            while True:
                head = await client.readuntil(b"\r\n\r\n")
                first, _, rest = head.partition(b"\r\n")
                if self._refuses(first.decode("latin-1")):
                    await _refuse(client, answer, first, rest)
                    return
                if server is None:
                    reader, server = await asyncio.open_connection(self._host, self._target_port)
                    answer_task = asyncio.create_task(_hand_back(reader, answer))
                server.write(head)
                async for block in _body(client, rest):
                    server.write(block)
                    await server.drain()
                await server.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done, or gone
        finally:
            if answer_task is not None:
                answer_task.cancel()
            for end in (server, answer):
                if end is not None:
                    end.close()

    def _refuses(self, request: str) -> bool:
        try:
            outage = json.loads(self._file.read_text())
        except FileNotFoundError:
            return False
        if outage.get("containing", "") not in request or self._refused >= outage.get("times", sys.maxsize):
            return False
        self._refused += 1
        print(f"503 {request}", flush=True)
        return True


async def _refuse(client: asyncio.StreamReader, answer: asyncio.StreamWriter, first: bytes, rest: bytes) -> None:
    # A client that waits for leave to send its body is told before.
    if b"100-continue" not in rest.lower():
        async for _ in _body(client, rest):
            pass
    head = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: "
    answer.write(head + str(len(_XML)).encode() + b"\r\n\r\n" + (b"" if first.startswith(b"HEAD ") else _XML))
    await answer.drain()


async def _hand_back(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while block := await source.read(_BLOCK):
            target.write(block)
            await target.drain()
    target.close()


async def _body(client: asyncio.StreamReader, headers: bytes) -> AsyncIterator[bytes]:
    remaining = 0
    for line in headers.decode("latin-1").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            remaining = int(value)
        elif name.strip().lower() == "transfer-encoding":
            raise ValueError(f"a body of unknown length: {line}")
    while remaining:
        block = await client.read(min(remaining, _BLOCK))
        if not block:
            raise asyncio.IncompleteReadError(b"", remaining)
        remaining -= len(block)
        yield block


async def main(host: str, port: str, target_port: str, file: str) -> None:
    """Serve until the process is ended."""
    outage = Outage(host, int(target_port), Path(file))
    async with await asyncio.start_server(outage.serve, host, int(port)) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
