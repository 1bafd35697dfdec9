"""Load for half an hour with a new version each minute: nothing lost, no mixed answer, memory flat.

    python -m bench.serve_soak --minutes 30

A model of a table of a million rows (64 MB, mapped), whose answers are exact whole numbers: each answer is compared
with what the version that it names must say of all its rows. Each minute some rows change: a delta is written, applied
and released; the server takes it by itself. Figures go to build/bench/serve-soak.json, lines to the screen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading

import numpy as np

from bench.report import Figure, publish
from bench.serve_load import request_of, run
from bench.serve_models import STEP, TABLE_ROWS, write_exact
from bench.serve_process import ServerProcess, served
from headrace.export.serve.delta import write_delta
from headrace.export.serve.repository import push, push_deltas
from headrace.storage import local
from headrace.workspace import checkout

ROWS, BATCHES, CHANGED = 64, 32, 1000
HOME = checkout() / "build" / "bench" / "soak"


class Answers:
    """Answers that each version must give, and those that came."""

    def __init__(self, table: np.ndarray) -> None:
        rng = np.random.default_rng(2)
        self.users = [rng.integers(0, TABLE_ROWS, ROWS) for _ in range(BATCHES)]
        self.expected: dict[int, list[bytes]] = {}
        self.seen: dict[int, int] = {}
        self.wrong = 0
        self.add(1, table)

    def add(self, version: int, table: np.ndarray) -> None:
        """Expect the answers of a version; called before it is pushed."""
        answers = [(table[u].sum(axis=1) + np.float32(version * STEP)).astype(np.float32).tobytes() for u in self.users]
        self.expected[version] = answers

    def check(self, request_index: int, head: bytes, body: bytes) -> None:
        """Compare an answer of 200 with the expected one."""
        split = int(head.split(b"inference-header-content-length: ", 1)[1].split(b"\r\n", 1)[0])
        version = int(json.loads(body[:split])["model_version"])
        self.seen[version] = self.seen.get(version, 0) + 1
        self.wrong += body[split:] != self.expected[version][request_index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=300, help="requests a second, of 64 rows")
    parser.add_argument("--switch-seconds", type=float, default=60)
    args = parser.parse_args()
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    table = np.random.default_rng(1).integers(0, 100, (TABLE_ROWS, 16)).astype(np.float32)
    write_exact(HOME / "first", 1, table)
    repository = local(HOME / "models")
    push(repository, {"exact": local(HOME / "first")})
    answers = Answers(table)
    memory: list[dict[str, float]] = []
    stop = threading.Event()
    with served(HOME / "models", HOME / "server.log", [0, 1], ["--poll-seconds", "1"]) as server:
        switching = threading.Thread(target=switch, args=(server, answers, table, args.switch_seconds, stop, memory))
        switching.start()
        requests = [request_of("exact", {"user": u}) for u in answers.users]
        outcome = run(server.port, requests, args.rate, args.minutes * 60, 64, check=answers.check, spin=False)
        stop.set()
        switching.join()
    anonymous = [m["anonymous"] for m in memory]
    third = max(1, len(anonymous) // 3)
    # The first third fills caches and arenas.
    middle, last = (float(np.mean(part)) for part in (anonymous[third : 2 * third] or anonymous, anonymous[-third:]))
    lost = outcome.lost + outcome.failed + outcome.refused
    publish(
        "serve-soak",
        [
            Figure("minutes of load", outcome.seconds / 60, "min"),
            Figure("answers", float(len(outcome.latencies)), "requests"),
            Figure("lost, failed or refused", float(lost), "requests"),
            Figure("answers that are not one version's", float(answers.wrong), "requests"),
            Figure("versions that answered", float(len(answers.seen)), "versions"),
            Figure("latency p50", outcome.ms(0.5), "ms"),
            Figure("latency p99", outcome.ms(0.99), "ms"),
            Figure("latency p99.9", outcome.ms(0.999), "ms"),
            Figure("memory, last third beside the second", last, "MiB", floor=middle),
        ],
    )


def switch(
    server: ServerProcess,
    answers: Answers,
    table: np.ndarray,
    seconds: float,
    stop: threading.Event,
    memory: list[dict[str, float]],
) -> None:
    """Push a new version each so many seconds, of the same table with some rows changed."""
    repository, rng, version = local(HOME / "models"), np.random.default_rng(3), 1
    while not stop.wait(seconds):
        version += 1
        rows = rng.integers(0, TABLE_ROWS, CHANGED)
        table[rows] = rng.integers(0, 100, (CHANGED, 16)).astype(np.float32)
        answers.add(version, table)
        shutil.rmtree(HOME / "new", ignore_errors=True)
        write_exact(HOME / "new", version, table)
        size = write_delta(
            local(HOME / "models" / "exact" / str(version - 1)), local(HOME / "new"), local(HOME / "delta")
        )
        pushed = push_deltas(repository, {"exact": local(HOME / "delta")}, keep=3)
        assert pushed == version, (pushed, version)
        memory.append(server.memory())
        memory_text = ", ".join(f"{k} {v:,.1f} MiB" for k, v in memory[-1].items())
        print(f"version {version}, a delta of {size:,} bytes; {memory_text}; wrong so far: {answers.wrong}", flush=True)


if __name__ == "__main__":
    main()
