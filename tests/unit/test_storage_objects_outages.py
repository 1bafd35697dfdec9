"""A store that is busy or away for a while: its requests are made again for longer than the library would by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from headrace.storage.objects import calls, clients

#: The library's own are ten.
REFUSALS = 40


class Busy(BaseHTTPRequestHandler):
    """The first requests are answered 503, the others as by a store with one object everywhere."""

    protocol_version = "HTTP/1.1"
    refused = 0

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if Busy.refused < REFUSALS:
            Busy.refused += 1
            self.send_response(503)
            body = b"<Error><Code>SlowDown</Code></Error>"
        else:
            self.send_response(200)
            self.send_header("ETag", '"tag"')
            self.send_header("Last-Modified", "Mon, 05 Jan 2026 00:00:00 GMT")
            body = b"data"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("obstore")
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(clients, "_LONGEST_WAIT", 0.002)
    monkeypatch.setattr(Busy, "refused", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        yield clients.open_bucket("s3", "bucket")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    "ask",
    [
        lambda bucket: calls.get(bucket, "key"),
        lambda bucket: calls.head(bucket, "key"),
        lambda bucket: calls.put(bucket, "key", b"data"),
        lambda bucket: calls.put_new(bucket, "key", b"data"),
        lambda bucket: calls.put_if(bucket, "key", b"data", "tag"),
    ],
    ids=["get", "head", "put", "put_new", "put_if"],
)
def test_a_call_outlasts_many_refusals(bucket: Any, ask: Callable[[Any], object]) -> None:
    assert ask(bucket) is not None
    assert Busy.refused == REFUSALS


def test_a_store_that_stays_away_is_an_error(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "RETRY_SECONDS", 0.01)
    short = clients.open_bucket("s3", "bucket")
    monkeypatch.setattr(Busy, "refused", -1_000_000)
    with pytest.raises(calls.StoreError, match="503"):
        calls.get(short, "key")
