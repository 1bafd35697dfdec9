"""`headrace serve` as a process on chosen cores, and what it has used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class ServerProcess:
    """A server that answers.

    Attributes:
        process: of it.
        port: of HTTP.
        grpc_port: of gRPC.
    """

    process: psutil.Process
    port: int
    grpc_port: int

    def cpu_seconds(self) -> float:
        """Return the processor seconds of all its threads, so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def memory(self) -> dict[str, float]:
        """Return MiB: what no file backs (anonymous), and all that is in memory, mapped files too (rss)."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0].lower(): int(line.split()[1]) / 1024 for line in lines}
        return {name: sizes[name] for name in ("anonymous", "rss")}

    def metrics(self) -> dict[str, float]:
        """Return the metrics by Prometheus' names, with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def total(self, name: str) -> float:
        """Return the sum of a metric over all labels."""
        return sum(v for k, v in self.metrics().items() if k.split("{")[0] == name)

    def index(self) -> object:
        """Return the repository's index, as the server tells it."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v2/repository/index", b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


def prefer(pid: int = 0) -> bool:
    """Give a process, by default this one, a higher priority than others on its core; whether that is allowed.

    Kernel threads that work for tens of milliseconds (page reclaim by access, writeback) would halve the core
    meanwhile; the floor is counted in processor time, which they do not enter.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, pid, -15)
    except PermissionError:
        return False
    return True


@contextmanager
def served(repository: Path, log: Path, cores: Sequence[int], arguments: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """Start a server on cores, whose number is onnxruntime's threads; end it with the block."""
    command = [sys.executable, "-m", "headrace.cli", "serve", str(repository), "--port", "0", "--grpc-port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--threads", str(len(cores)), *arguments], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        # Before it starts threads, which take both along.
        os.sched_setaffinity(process.pid, cores)
        prefer(process.pid)
        while not (match := re.search(r":(\d+), gRPC 127\.0\.0\.1:(\d+)", log.read_text().replace("\n", " "))):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        yield ServerProcess(psutil.Process(process.pid), int(match[1]), int(match[2]))
    finally:
        process.terminate()
        process.wait(30)
