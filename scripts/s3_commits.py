"""Two Spark applications append to one Delta table in S3 at once: no acknowledged commit may be lost.

    PYTHONPATH=. python scripts/s3_commits.py [--commits N] [--put-seconds S] [--delta]

Each makes N commits of one row; the store takes S seconds to begin with a PUT. In the end the table must have as many
rows and versions as commits were acknowledged.
`--delta`: by Delta's own store of the log for S3, which loses some, for comparison. Wants `make s3 s3proxy`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.lake.spark.session import session
from tests.s3_server import BUCKET, s3_server

_DELTAS = {f"spark.delta.logStore.{s}.impl": "io.delta.storage.S3SingleDriverLogStore" for s in ("s3", "s3a")}


@contextmanager
def slow_puts(endpoint: str, seconds: float) -> Iterator[str]:
    """Yield an endpoint that hands all on to another one, each PUT after so many seconds; plain HTTP, on this machine.

    S3Proxy has a setting for slow PUTs, with which it forgets conditions.
    A request is told by how a block from the client begins: clients send no two of them at once on a connection.
    """
    host, _, port = endpoint.removeprefix("http://").partition(":")
    ready, started = Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]]()

    async def hand_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, wait: float) -> None:
        try:
            while block := await source.read(1 << 16):
                if block.startswith(b"PUT "):
                    await asyncio.sleep(wait)
                target.write(block)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()

    async def serve(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            answer.close()
            return
        # At the end of the loop connections may be open.
        with suppress(asyncio.CancelledError):
            await asyncio.gather(hand_on(client, writer, seconds), hand_on(reader, answer, 0))

    async def run() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        started.append((asyncio.get_running_loop(), stop, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        ready.set()
        await stop.wait()
        server.close()

    thread = Thread(target=asyncio.run, args=(run(),), name="slow-puts", daemon=True)
    thread.start()
    ready.wait()
    loop, stop, slow = started[0]
    try:
        yield slow
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def append(home: Path, name: str, commits: int, delta: bool) -> None:
    """Append `commits` rows, one by one, once a line comes in; prints how many were acknowledged."""
    ws = Workspace.from_environment(home, os.environ)
    # One task for each reading of the log: it is what a commit mostly waits for.
    properties = {"spark.databricks.delta.snapshotPartitions": "1", **(_DELTAS if delta else {})}
    conf = Spark(master="local[1]", driver_memory="1g", properties=properties)
    with session(conf, ws, name) as spark:
        path = str(ws.table("clicks", "log"))
        spark.sql(f"SELECT '{name}' AS who, -1 AS n").write.format("delta").mode("append").save(path)
        print("ready", flush=True)
        sys.stdin.readline()
        done = 0
        for n in range(commits):
            rows = spark.sql(f"SELECT '{name}' AS who, {n} AS n").coalesce(1)
            try:
                rows.write.format("delta").mode("append").save(path)
            except Exception as e:
                print(f"{name}: commit {n}: {str(e)[:200]}", file=sys.stderr, flush=True)
            else:
                done += 1
        print(done, flush=True)


def both(folder: Path, commits: int, delta: bool, put_seconds: float) -> None:
    """Run two of them, and count."""
    with s3_server(folder) as server, slow_puts(server.endpoint, put_seconds) as slow:
        os.environ.update({**server.environ, "AWS_ENDPOINT_URL": slow, "HEADRACE_LAKE": f"s3://{BUCKET}/lake"})
        more = ["--commits", str(commits), *(["--delta"] if delta else [])]
        line = [sys.executable, __file__, "--home", str(folder / "home"), *more, "--name"]
        writers: list[subprocess.Popen[str]] = []
        for name in ("one", "two"):
            writers.append(subprocess.Popen([*line, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            # The first makes the table.
            _line(writers[-1])
        started = time.perf_counter()
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("\n")
            writer.stdin.flush()
        done = [int(_line(writer)) for writer in writers]
        seconds = time.perf_counter() - started
        for writer in writers:
            writer.wait()
        ws = Workspace.from_environment(folder / "home", os.environ)
        with session(Spark(master="local[1]", driver_memory="1g"), ws, "count") as spark:
            table = spark.read.format("delta").load(str(ws.table("clicks", "log")))
            rows = table.where("n >= 0").groupBy("who").count().collect()
        counts = {r["who"]: r["count"] for r in rows}
        newest = DeltaLog(ws.table("clicks", "log")).version
    print(f"acknowledged {done[0]} + {done[1]}, found {counts.get('one', 0)} + {counts.get('two', 0)} rows")
    # Of each writer the first commit is no row that is counted.
    print(f"newest version {newest}, of {sum(done) + 1}; {seconds:,.0f} s, PUTs held back for {put_seconds:g} s each")
    if [counts.get("one", 0), counts.get("two", 0)] != done or newest != sum(done) + 1:
        raise SystemExit("acknowledged commits were lost")


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline().strip()
    if not text:
        raise SystemExit("a writer has ended")
    return text


def main() -> None:
    """Run both writers, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=200)
    parser.add_argument("--put-seconds", type=float, default=0.3, help="what the store waits before each PUT")
    parser.add_argument("--delta", action="store_true")
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.name:
        append(args.home, args.name, args.commits, args.delta)
        return
    with tempfile.TemporaryDirectory() as temporary:
        both(Path(temporary), args.commits, args.delta, args.put_seconds)


if __name__ == "__main__":
    main()
