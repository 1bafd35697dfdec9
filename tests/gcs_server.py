"""A server of a few of Google Cloud Storage's calls, for its client: objects have generations, and PUTs conditions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import pytest


@contextmanager
def gcs_bucket() -> Iterator[Any]:
    """A bucket of the real client, whose server is in this process."""
    gcs = pytest.importorskip("obstore.store").GCSStore
    lock = Lock()
    objects: dict[str, tuple[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            stored = objects.get(self.path)
            self._answer(404 if stored is None else 200, stored)

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            condition = self.headers.get("x-goog-if-generation-match")
            with lock:
                generation, _ = objects.get(self.path, (0, b""))
                if condition is not None and int(condition) != generation:
                    return self._answer(412, None)
                objects[self.path] = generation + 1, data
            return self._answer(200, (generation + 1, data), has_body=False)

        def _answer(self, status: int, stored: tuple[int, bytes] | None, has_body: bool = True) -> None:
            generation, data = stored or (0, b"")
            self.send_response(status)
            if stored is not None:
                self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
                self.send_header("x-goog-generation", str(generation))
                self.send_header("Last-Modified", "Mon, 05 Jan 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(data) if has_body else 0))
            self.end_headers()
            if has_body and self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    account = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    try:
        yield gcs(
            "bucket",
            config={"service_account_key": json.dumps(account)},
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
