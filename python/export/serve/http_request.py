"""Heads and bodies of HTTP requests; llhttp parses a head, unless the cache has the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import httptools
import numpy as np

from headrace.export.serve.options import RequestError

#: Most heads in the cache, and most bytes of a cached head.
_HEADS, _HEAD_BYTES = 1024, 4096
_END = b"\r\n\r\n"

#: Most bytes that are allocated for a body in advance; beyond them memory grows with the bytes that arrive.
_FIRST = 1 << 20


@dataclass(frozen=True, slots=True)
class Head:
    """Fields of a head that the server uses.

    Attributes:
        method: method of the request.
        path: path as it was sent, without the query.
        length: bytes of the body; 0 for a chunked body.
        json_bytes: bytes of the body that are JSON (Inference-Header-Content-Length); None: all.
        authorization: value of Authorization.
        encoding: value of Content-Encoding.
        keep_alive: whether the connection takes further requests.
        chunked: whether the body has no length.
        expects_continue: whether the client waits before it sends the body.
    """

    method: str
    path: str
    length: int
    json_bytes: int | None
    authorization: bytes
    encoding: bytes
    keep_alive: bool
    chunked: bool
    expects_continue: bool


class Heads:
    """Cache of the last heads."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def find(self, data: bytearray, start: int, stop: int) -> tuple[Head, int] | None:
        """Return a cached head that begins at `start`, and its end; None if the cache has none."""
        end = data.find(_END, start, min(stop, start + _HEAD_BYTES)) + len(_END)
        if end < len(_END):
            return None
        head = self._known.get(bytes(data[start:end]))
        return None if head is None else (head, end)

    def add(self, data: bytes, head: Head) -> None:
        """Add a head; a full cache is emptied first."""
        if len(data) <= _HEAD_BYTES:
            if len(self._known) >= _HEADS:
                self._known.clear()
            self._known[data] = head


class HeadReader:
    """Reader of a head and, if the head announces one, of a chunked body, in parts as they arrive.

    Attributes:
        head: the head, once it is complete.
        data: bytes of the head so far.
        chunks: parts of the body since the last call of `read_chunks`.
        complete: whether a chunked body has ended.
        unread: bytes since the body's last part: sizes and extensions of chunks, or trailers, which are ignored.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self.data = bytearray()
        self.chunks: list[bytes] = []
        self.complete = False
        self.unread = 0
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._in_head, self._keep_alive = True, False

    def read_head(self, data: memoryview) -> int:
        """Read bytes of a head, and return how many of them belong to it.

        Raises:
            RequestError: the bytes are not HTTP (400), or the body has an unknown coding (501).
        """
        previous_size = len(self.data)
        self.data += data
        # The end of the head may have begun in the previous part.
        end = self.data.find(_END, max(0, previous_size - len(_END) + 1))
        stop = len(self.data) if end < 0 else end + len(_END)
        del self.data[stop:]
        self._feed(data[: stop - previous_size])
        if not self._in_head:
            self.head = self._head()
        elif end >= 0:  # empty lines before the request
            self.data.clear()
        return stop - previous_size

    def read_chunks(self, data: memoryview) -> list[bytes]:
        """Read bytes of a chunked body, and return its parts. Raises RequestError (400) if a chunk is malformed."""
        self.chunks = []
        self._feed(data)
        self.unread = 0 if self.chunks else self.unread + len(data)
        return self.chunks

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # the request is answered without the upgrade
        except httptools.HttpParserError as e:
            if self.complete:  # of what came behind the last chunk, which nobody reads
                return
            raise RequestError(400, f"this is no HTTP request: {e}"[:200]) from None

    def _head(self) -> Head:
        try:
            path = httptools.parse_url(self._url).path or b""
        except httptools.HttpParserError:
            raise RequestError(400, "malformed request target") from None
        headers = self._headers
        coding = headers.get(b"transfer-encoding")
        if coding is not None and self._parser.get_http_version() == "1.0":
            raise RequestError(400, "HTTP/1.0 has no Transfer-Encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            raise RequestError(501, "bodies are taken plain or chunked, in no other Transfer-Encoding")
        json_bytes = headers.get(b"inference-header-content-length")
        return Head(
            method=self._parser.get_method().decode("latin-1"),
            path=path.decode("latin-1"),
            length=_number("Content-Length", headers.get(b"content-length", b"0")),
            json_bytes=None if json_bytes is None else _number("Inference-Header-Content-Length", json_bytes),
            authorization=headers.get(b"authorization", b""),
            encoding=headers.get(b"content-encoding", b""),
            keep_alive=self._keep_alive,
            chunked=coding is not None,
            expects_continue=headers.get(b"expect", b"").lower() == b"100-continue",
        )

    # Callbacks of llhttp.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            name, earlier_value = name.lower(), self._headers.get(name.lower())
            self._headers[name] = value if earlier_value is None else earlier_value + b", " + value

    def on_headers_complete(self) -> None:
        if self._in_head:
            self._in_head = False
            self._keep_alive = self._parser.get_http_version() == "1.1" and self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        if not self.complete:
            self.chunks.append(part)

    def on_message_complete(self) -> None:
        self.complete = True


def _number(name: str, value: bytes) -> int:
    value = value.strip()
    if not value.isdigit() or len(value) > 18:
        raise RequestError(400, f"{name} must be a number of bytes")
    return int(value)


class Body:
    """Body of known length, into which the connection reads bytes directly.

    Attributes:
        length: bytes of the complete body.
        filled: bytes that have arrived.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0
        self._bytes = _room(min(length, _FIRST))

    def free(self) -> memoryview:
        """Return the memory for the next bytes; empty when the body is complete."""
        if self.filled == len(self._bytes) < self.length:
            larger = _room(min(self.length, 2 * self.filled))
            larger[: self.filled] = self._bytes
            self._bytes = larger
        return self._bytes[self.filled :]

    def add(self, data: memoryview) -> None:
        """Copy bytes from another buffer, at most as many as are missing."""
        while data:
            free = self.free()
            count = min(len(data), len(free))
            free[:count] = data[:count]
            self.filled += count
            data = data[count:]

    def all(self) -> memoryview:
        """Return the bytes that have arrived."""
        return self._bytes[: self.filled]


def _room(count: int) -> memoryview:
    # np.empty does not touch the memory, so the kernel allocates its pages only as bytes arrive.
    return np.empty(count, np.uint8).data
