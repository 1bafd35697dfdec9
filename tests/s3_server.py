"""An S3 server of this machine for tests: S3Proxy, one process that serves a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.config.installation import checkout
from headrace.storage import local

#: Any values: the server is of this machine alone, and gone with its test.
KEY, SECRET = "rackkey", "not-a-secret-of-anybody"
BUCKET = "headrace"
_LOG = """<configuration><root level="WARN"><appender-ref ref="out"/></root>
<appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder><pattern>%msg%n</pattern></encoder></appender>
</configuration>"""


@dataclass(frozen=True)
class S3Server:
    """A server at work."""

    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the variables by which AWS's own tools reach this server."""
        return environ_of(self.endpoint)


def jars() -> Path:
    """Return the folder into which `gradle s3proxy` puts the server."""
    return checkout() / "build" / "s3proxy"


def prepare(folder: Path, endpoint: str, seen_as: Path | None = None) -> None:
    """Write a server's settings, and make its bucket.

    Args:
        folder: for them, and for what the server keeps.
        endpoint: its URL.
        seen_as: the folder, as the server sees it.
    """
    seen = seen_as or folder
    settings = {
        "s3proxy.authorization": "aws-v4",
        "s3proxy.endpoint": endpoint,
        "s3proxy.identity": KEY,
        "s3proxy.credential": SECRET,
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(seen / "buckets"),
        "jclouds.identity": "x",
        "jclouds.credential": "x",
    }
    (local(folder) / "buckets" / BUCKET).make_dir()
    (local(folder) / "s3.conf").put_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    (local(folder) / "logback.xml").put_text(_LOG)


def command(folder: Path) -> list[str]:
    """The command line of a server whose folder was prepared, as it sees it."""
    line = ["java", "-Xmx256m", f"-Dlogback.configurationFile={folder / 'logback.xml'}", "-cp", f"{jars()}/*"]
    return [*line, "org.gaul.s3proxy.Main", "--properties", str(folder / "s3.conf")]


def environ_of(endpoint: str) -> Mapping[str, str]:
    """Return the variables by which AWS's own tools reach a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with one bucket, BUCKET, in a folder; skips the test where its jars were not fetched."""
    if not any(jars().glob("s3proxy-*.jar")):
        pytest.skip("no S3Proxy in build/s3proxy: run `make s3proxy`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    prepare(folder, endpoint)
    with open(folder / "s3.log", "ab") as log:
        process = subprocess.Popen(
            command(folder),
            stdout=log,
            stderr=log,
            env={k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
        )
    try:
        _wait(endpoint, process)
        yield S3Server(endpoint, process)
    finally:
        process.kill()
        process.wait()


def _wait(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(endpoint, timeout=5)
        except urllib.error.HTTPError:
            return  # it wants a signature
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"S3Proxy ended with {process.returncode}") from None
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("S3Proxy does not answer")
