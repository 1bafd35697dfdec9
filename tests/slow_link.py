"""A link of a given bandwidth between this machine and a server on it: a proxy of TCP that counts bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_BLOCK = 128 << 10


class _Bandwidth:
    """Bytes of all connections together, in one direction."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._lock, self._free_at = bytes_per_second, threading.Lock(), 0.0

    def pass_through(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0.001:
            time.sleep(wait)


@contextmanager
def slow_link(endpoint: str, bits_per_second: float) -> Iterator[str]:
    """The address under which `http://127.0.0.1:PORT` answers over such a link."""
    port = int(endpoint.rsplit(":", 1)[1])
    ways = [_Bandwidth(bits_per_second / 8) for _ in range(2)]

    def pump(source: socket.socket, target: socket.socket, way: _Bandwidth) -> None:
        with suppress(OSError):
            while block := source.recv(_BLOCK):
                way.pass_through(len(block))
                target.sendall(block)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", port))
                    for source, target, way in ((client, server, ways[0]), (server, client, ways[1])):
                        threading.Thread(target=pump, args=(source, target, way), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
