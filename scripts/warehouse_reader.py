"""Poll a scores table in PostgreSQL while two publishers replace its days, are killed, and lose their connections.

    .venv/bin/python scripts/warehouse_reader.py [--reads 100000] [--users 300]

Each version of a day says in `model_version` how many rows it has. A read is a fault when it sees rows of two
versions, a part of one, or a day that is not there. The publishers are processes that stage, send each partition twice
at once (as Spark's speculation does) and swap; one of them is killed (SIGKILL), or one of their connections is cut,
twice a second on average. Prints a line a minute, and at the end what was seen; ends with 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa

from headrace.config import Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.postgres import publication, tables
from headrace.publish.postgres import server as warehouse

DAYS = ("2026-01-10", "2026-01-11")
TYPES = {
    "ds": "string",
    "user_id": "bigint",
    "item_id": "bigint",
    "rank": "int",
    "score": "float",
    "model_version": "string",
}
TABLE = tables.scores_table("public", "scores", "user_id", "item_id", list(TYPES.items()))
_RANKS = 5
_WRITERS = 2
_READERS = 2


def rows_of(ds: str, users: range, version: str) -> pa.RecordBatch:
    """Return the items of each user: `_RANKS` rows."""
    keys = [(user, rank) for user in users for rank in range(1, _RANKS + 1)]
    return pa.RecordBatch.from_pydict(
        {
            "ds": [ds] * len(keys),
            "user_id": [u for u, _ in keys],
            "item_id": [r for _, r in keys],
            "rank": [r for _, r in keys],
            "score": [1.0 / r for _, r in keys],
            "model_version": [version] * len(keys),
        }
    )


def publish(server: warehouse.Server, ds: str, users: int) -> None:
    """Stage `users` users in two partitions, each sent twice at once, and swap them in."""
    version, half = str(users * _RANKS), users // 2
    with server.connect() as conn, publication.staging_table(conn, TABLE, ds, version) as staged:

        def send(number: int, part: range) -> None:
            batches = iter([rows_of(ds, part, version)])
            publication.copy_partition(server, staged.id, staged.parts, list(TYPES), number, batches)

        parts = [(0, range(half)), (1, range(half, users))] * 2
        failed: list[BaseException] = []

        def attempt(number: int, part: range) -> None:
            try:
                send(number, part)
            except psycopg.Error as e:
                failed.append(e)

        threads = [threading.Thread(target=attempt, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        counted = staged.query(f"SELECT count(*) FROM {staged.relation}")[0][0]
        assert counted == users * _RANKS, f"{counted} rows staged, not {users * _RANKS}"
        staged.rows = counted
        publication.swap(conn, staged, TABLE, "script", [])


def publisher(home: Path, users: int, seed: int) -> None:
    """Publish days again and again, until killed; a line on stdout for each that was published."""
    rng = random.Random(seed)
    with warehouse.serve(Warehouse(), Workspace(home)) as server:
        while True:
            try:
                publish(server, rng.choice(DAYS), rng.randint(2, users))
                print("published", flush=True)
            except psycopg.Error:
                print("lost", flush=True)
            except UserError:
                print("busy", flush=True)


class Publishers:
    """The two processes: started anew when they are killed."""

    def __init__(self, home: Path, users: int) -> None:
        self._words = [sys.executable, __file__, "--home", str(home), "--users", str(users), "--publisher"]
        self.counts: Counter[str] = Counter()
        self._ready: set[int] = set()
        self._processes = [self._start(i) for i in range(_WRITERS)]

    def _start(self, i: int) -> subprocess.Popen[str]:
        process = subprocess.Popen([*self._words, str(random.randrange(10**6))], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.counts[line.strip()] += 1
            self._ready.add(process.pid)

    def kill(self, i: int, again: bool = True) -> None:
        """Kill one as the kernel does, and start it anew; not one that is starting still."""
        if again and self._processes[i].pid not in self._ready:
            return
        self._processes[i].send_signal(signal.SIGKILL)
        self._processes[i].wait()
        self.counts["killed"] += 1
        if again:
            self._processes[i] = self._start(i)


def look(conn: warehouse.Connection, query: str) -> tuple[str, str | None]:
    """Return the version that a query sees, and what is wrong with it, or None."""
    row = conn.execute(query).fetchone()
    assert row is not None
    rows, low, high = row
    is_consistent = low is not None and low == high and rows == int(low)
    return str(low), None if is_consistent else f"{rows} rows of {low} to {high}"


def queries() -> Iterator[str]:
    """Yield the queries of a reader: each day, and the view of the newest."""
    select = "SELECT count(*), min(model_version), max(model_version) FROM"
    while True:
        for ds in DAYS:
            yield f"{select} scores WHERE ds = '{ds}'"
        yield f"{select} scores_current"


def poll(home: Path, reads: int, users: int) -> int:
    """Read until `reads` reads are done. Returns the number of faults."""
    done, lock = Counter[str](), threading.Lock()
    faults: list[str] = []
    seen: set[str] = set()
    readers: list[int] = []
    with warehouse.serve(Warehouse(), Workspace(home)) as server, server.connect() as conn:
        tables.create_tables(conn, TABLE)
        for ds in DAYS:
            publish(server, ds, users)
        publishers, stop = Publishers(home, users), threading.Event()

        def read() -> None:
            with server.connect() as reader:
                readers.append(reader.info.backend_pid)
                for query in queries():
                    if stop.is_set():
                        return
                    version, fault = look(reader, query)
                    with lock:
                        seen.add(version)
                        done["reads"] += 1
                        if fault:
                            faults.append(fault)
                            print(f"FAULT: {query}: {fault}", flush=True)
                        if done["reads"] >= reads:
                            stop.set()

        def hurt() -> None:
            killable = "application_name = 'headrace' AND pid <> ALL(%s)"
            with server.connect() as killer:
                while len(readers) < _READERS:
                    time.sleep(0.01)
                while not stop.wait(random.expovariate(2.0)):
                    if random.random() < 0.3:
                        publishers.kill(random.randrange(_WRITERS))
                    else:
                        spared = [killer.info.backend_pid, conn.info.backend_pid, *readers]
                        cut = killer.execute(
                            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {killable} ORDER BY "
                            f"random() LIMIT 1",
                            [spared],
                        ).fetchall()
                        publishers.counts["cut"] += len(cut)

        def watch() -> None:
            started = time.monotonic()
            print(f"{'minute':>6} {'reads':>8} {'published':>10} {'killed':>7} {'cut':>6} {'faults':>7}", flush=True)
            while not stop.wait(60):
                show(started)
            show(started)

        def show(started: float) -> None:
            c = publishers.counts
            minute = (time.monotonic() - started) / 60
            print(
                f"{minute:>6.1f} {done['reads']:>8,} {c['published']:>10,} {c['killed']:>7,} {c['cut']:>6,} "
                f"{len(faults):>7,}",
                flush=True,
            )

        threads = [threading.Thread(target=t) for t in (*[read] * _READERS, hurt, watch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(_WRITERS):
            publishers.kill(i, again=False)
        print(f"{done['reads']:,} reads, {len(seen)} sizes of versions seen, {len(faults)} faults")
        print(", ".join(f"{name}: {count:,}" for name, count in sorted(publishers.counts.items())))
    return len(faults)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--users", type=int, default=300, help="of the largest version")
    parser.add_argument("--home", type=Path, help="default: a temporary folder")
    parser.add_argument("--publisher", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publisher is not None:
        publisher(args.home, args.users, args.publisher)
        return os.EX_OK
    with tempfile.TemporaryDirectory() as folder:
        return 1 if poll(args.home or Path(folder) / "home", args.reads, args.users) else os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
