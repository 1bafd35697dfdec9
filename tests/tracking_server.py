"""A tracking server of MLflow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tracking_server(folder: Path) -> Iterator[str]:
    """`mlflow server` on this machine, with artifacts of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    line += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "files")]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (
        open(folder / "server.log", "wb") as log,
        subprocess.Popen(line, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True) as process,
    ):
        try:
            for _ in range(1200):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None, (folder / "server.log").read_text()[-4000:]
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 9)
