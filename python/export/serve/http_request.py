"""Heads and bodies of HTTP requests; llhttp parses a head, unless the same bytes came before."""

from __future__ import annotations

from dataclasses import dataclass

import httptools
import numpy as np

from headrace.export.serve.options import RequestError

#: Heads that are kept, and bytes of one.
_HEADS, _HEAD_BYTES = 1024, 4096
_END = b"\r\n\r\n"

#: Bytes for which room is made at once; beyond them, as bytes come and not as they are said to come.
_FIRST = 1 << 20


@dataclass(frozen=True, slots=True)
class Head:
    """Fields of a head that the server uses.

    Attributes:
        method: of the request.
        path: as it was sent, without the query.
        length: bytes of the body; 0 where it is chunked.
        json_bytes: of the body that are JSON, as Inference-Header-Content-Length says; None: all of it.
        authorization: the header's value.
        encoding: Content-Encoding's.
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
        """Return a head that begins at `start` and was seen before, and where it ends."""
        end = data.find(_END, start, min(stop, start + _HEAD_BYTES)) + len(_END)
        if end < len(_END):
            return None
        head = self._known.get(bytes(data[start:end]))
        return None if head is None else (head, end)

    def add(self, data: bytes, head: Head) -> None:
        """Keep one."""
        if len(data) <= _HEAD_BYTES:
            if len(self._known) >= _HEADS:
                self._known.clear()
            self._known[data] = head


class HeadReader:
    """Reads one head, and where it says so a chunked body, in as many parts as they come.

    Attributes:
        head: when all of it has come.
        data: of the head, so far.
        chunks: of the body, since `read_chunks` was called last.
        complete: whether a chunked body has ended.
        unread: bytes since its last part: of a chunk's size and extensions, or of trailers, which nobody asks for.
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
        """Take bytes of a head; how many of them were its own. Raises RequestError: this is no HTTP (400), or a
        body in an unknown coding (501).
        """
        previous_size = len(self.data)
        self.data += data
        # The end may have begun in the part before.
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
        """Take bytes of a chunked body: what they have of it. Raises RequestError (400): they are no chunks."""
        self.chunks = []
        self._feed(data)
        self.unread = 0 if self.chunks else self.unread + len(data)
        return self.chunks

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # it is answered as what it is without the upgrade
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

    # What llhttp calls.

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
        length: of all.
        filled: bytes that have come.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0
        self._bytes = _room(min(length, _FIRST))

    def free(self) -> memoryview:
        """Return the memory for the next bytes; empty when all have come."""
        if self.filled == len(self._bytes) < self.length:
            larger = _room(min(self.length, 2 * self.filled))
            larger[: self.filled] = self._bytes
            self._bytes = larger
        return self._bytes[self.filled :]

    def add(self, data: memoryview) -> None:
        """Take bytes that are elsewhere, no more than are missing."""
        while data:
            free = self.free()
            count = min(len(data), len(free))
            free[:count] = data[:count]
            self.filled += count
            data = data[count:]

    def all(self) -> memoryview:
        """Return the bytes that have come."""
        return self._bytes[: self.filled]


def _room(count: int) -> memoryview:
    # NumPy leaves memory as it is found, so that no page is there before bytes come.
    return np.empty(count, np.uint8).data
