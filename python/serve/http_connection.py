"""A connection of uvicorn's with time limits: what comes too slowly, or is not taken, holds nothing for long."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.serve.options import Limits


def connection_class(limits: Limits) -> type[asyncio.Protocol]:
    """The class of connections for `uvicorn.Config.http`."""

    class Connection(HttpToolsProtocol):
        """One connection."""

        _deadline: asyncio.TimerHandle | None = None
        _send_deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _in_headers = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            self._taken()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._header_bytes += len(data)
            super().data_received(data)
            if self._in_headers and self._header_bytes > limits.header_bytes:
                self._refuse(b"431 Request Header Fields Too Large", b"the request's header is too long")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            if self._deadline is None:
                self._expect()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._header_bytes = 0
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._arrived()
            self._in_headers = True
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._taken()
            self._send_deadline = self.loop.call_later(limits.send_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._taken()

        def _expect(self) -> None:
            self._deadline = self.loop.call_later(limits.receive_seconds, self._too_slow)

        def _arrived(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _taken(self) -> None:
            if self._send_deadline is not None:
                self._send_deadline.cancel()
                self._send_deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            seconds = b"%g" % limits.receive_seconds
            self._refuse(b"408 Request Timeout", b"the request has not arrived within " + seconds + b" seconds")

        def _refuse(self, status: bytes, why: bytes) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                body = b'{"error":"' + why + b'"}'
                head = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
                self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            self.transport.close()

    return Connection
