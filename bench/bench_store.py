"""Waiting times of training where dataset, checkpoints and model are in a store of objects.

    PYTHONPATH=. python -m bench.bench_store

One rank trains on rows of Criteo's shape: from local files, from S3Proxy on this machine, and over links of 1 Gbit/s
and 100 Mbit/s to it (a proxy of TCP), each time with an empty cache. A checkpoint each 32 steps of 96.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.peers.torchrec_step import TrainingStep
from bench.report import Figure, publish
from bench.train_ranks import model_of, schema_of, train_of
from headrace.config.workspace import Workspace
from headrace.stage.manifest import Manifest, Output
from headrace.storage import local, location_of
from headrace.train.job import Job
from tests.s3_server import BUCKET, s3_server

#: Rows of a file, 5 MB.
_ROWS = 32_768
_FILES = 12
_NAME = "datasets/bench/2026-01-01/k"


_BLOCK = 128 << 10


class _Bandwidth:
    """Bytes of all connections together, in one direction."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._lock, self._free_at = bytes_per_second, threading.Lock(), 0.0

    def pass_through(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0.001:
            time.sleep(wait)


@contextmanager
def slow_link(endpoint: str, bits_per_second: float) -> Iterator[str]:
    """Yield the address under which `http://127.0.0.1:PORT` answers over such a link."""
    port = int(endpoint.rsplit(":", 1)[1])
    ways = [_Bandwidth(bits_per_second / 8) for _ in range(2)]

    def pump(source: socket.socket, target: socket.socket, way: _Bandwidth) -> None:
        with suppress(OSError):
            while block := source.recv(_BLOCK):
                way.pass_through(len(block))
                target.sendall(block)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", port))
                    for source, target, way in ((client, server, ways[0]), (server, client, ways[1])):
                        threading.Thread(target=pump, args=(source, target, way), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def step() -> TrainingStep:
    """Return a step of 26 tables of 20,000 rows: a checkpoint is 35 MB."""
    return TrainingStep(
        (20_000,) * 26, ids=1, dim=16, batch=4_096, world=1, dense=13, bottom=(512, 256, 16), top=(512, 256)
    )


def write_dataset(folder: Path) -> None:
    """Write a dataset as the features stage writes it, with its listing."""
    spec, listed = step(), []
    for split, files in (("train", _FILES), ("valid", 1)):
        (folder / split).mkdir(parents=True)
        for number in range(files):
            rng = np.random.default_rng([files, number])
            columns = {f"c{i}": rng.random(_ROWS, np.float32) for i in range(spec.dense)}
            columns |= {f"t{i}": rng.integers(1, n, _ROWS, dtype=np.int32) for i, n in enumerate(spec.rows)}
            columns["label"] = rng.integers(0, 2, _ROWS).astype(np.float32)
            file = folder / split / f"part-{number:04d}.parquet"
            pq.write_table(pa.table(columns), file, compression="none", use_dictionary=False)
            size = file.stat().st_size
            listed.append({"name": f"{split}/{file.name}", "size": size, "rows": _ROWS, "row_groups": 1})
    (folder / "_files.json").write_text(json.dumps(listed))
    (folder / "workflow").mkdir()
    (folder / "workflow" / "workflow.json").write_text("{}\n")


def train(home: Path, store: str | None) -> dict[str, float]:
    """Train in this process; seconds of it all, and of what the loop waited for."""
    from headrace.train.loop.run import train_local

    manifest = Manifest(
        stage="features",
        pipeline="bench",
        ds="2026-01-01",
        key="k",
        spec_hash="bench",
        dataset_schema=schema_of(step()),
        outputs=(Output(kind="dataset", name=_NAME, version="k", rows=_ROWS * _FILES),),
    )
    job = Job(
        home=home,
        store=store,
        pipeline="bench",
        ds="2026-01-01",
        key="k",
        features=manifest,
        model=model_of(step()),
        train=train_of(step(), streams=4, checkpoint_steps=32),
        threads=1,
    )
    starts: list[float] = []
    ends: list[float] = []

    def on_progress(event: object) -> None:
        if getattr(event, "phase", "") == "train":
            ends[:] = [time.perf_counter()]
            starts.extend(ends if not starts else [])

    report = train_local(job, on_progress)
    return {
        "steps": report.steps,
        "seconds": ends[0] - starts[0],
        "data_wait": report.data_wait_seconds,
        "checkpoint_wait": report.checkpoint_wait_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs=2, metavar=("HOME", "STORE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        home, store = args.train
        print(json.dumps(train(Path(home), store or None)))
        return
    figures = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        write_dataset(root / "local" / _NAME)
        (root / "s3").mkdir()
        server = stack.enter_context(s3_server(root / "s3"))
        os.environ.update(server.environ)
        os.environ["HEADRACE_CACHE"] = str(root / "cache")
        ways = {"local files": None, "S3Proxy": server.endpoint}
        for name, rate in (("1 Gbit/s", 1e9), ("100 Mbit/s", 1e8)):
            ways[name] = stack.enter_context(slow_link(server.endpoint, rate))
        for number, (name, endpoint) in enumerate(ways.items()):
            store = "" if endpoint is None else f"s3://{BUCKET}/{number}"
            if store:
                with Workspace(root / "up", store_uri=store).locate(_NAME).new_folder() as target:
                    target.copy_from(local(root / "local" / _NAME))
            env = {**os.environ, "HEADRACE_CACHE": str(root / f"cache-{number}"), "AWS_ENDPOINT_URL": endpoint or ""}
            home = root / "local" if endpoint is None else root / f"home-{number}"
            line = [sys.executable, "-m", "bench.bench_store", "--train", str(home), store]
            done = subprocess.run(line, env=env, stdout=subprocess.PIPE, check=True, text=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            figures += [
                Figure(f"{name}: training", measured["seconds"], "s"),
                Figure(f"{name}: share waited for data", measured["data_wait"] / measured["seconds"], ""),
                Figure(f"{name}: share waited for checkpoints", measured["checkpoint_wait"] / measured["seconds"], ""),
            ]
            if store:
                location_of(store).remove()
    publish("store", figures)


if __name__ == "__main__":
    main()
