"""A server's PUTs held back on their way: a store that takes its time to write, and keeps its conditions.

(S3Proxy has a setting for that, with which it forgets conditions.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread


@contextmanager
def slow_puts(endpoint: str, seconds: float) -> Iterator[str]:
    """An endpoint that hands all on to another one, each PUT after so many seconds; plain HTTP, on this machine.

    A request is told by how a block from the client begins: clients send no two of them at once on a connection.
    """
    host, _, port = endpoint.removeprefix("http://").partition(":")
    ready, started = Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]]()

    async def hand_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, wait: float) -> None:
        try:
            while block := await source.read(1 << 16):
                if block.startswith(b"PUT "):
                    await asyncio.sleep(wait)
                target.write(block)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()

    async def serve(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            answer.close()
            return
        # At the end of the loop connections may be open.
        with suppress(asyncio.CancelledError):
            await asyncio.gather(hand_on(client, writer, seconds), hand_on(reader, answer, 0))

    async def run() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        started.append((asyncio.get_running_loop(), stop, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        ready.set()
        await stop.wait()
        server.close()

    thread = Thread(target=asyncio.run, args=(run(),), name="slow-puts", daemon=True)
    thread.start()
    ready.wait()
    loop, stop, slow = started[0]
    try:
        yield slow
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
