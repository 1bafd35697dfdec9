"""`headrace serve`: latency against offered load, rows a second, and what Python costs beside onnxruntime.

    make bench-serve
    python -m bench.bench_serve 64 256       # requests of so many rows alone
    python -m bench.bench_serve --soak --minutes 30

The server has one core and one thread of onnxruntime, the generator of requests (bench.serve_load, an open loop)
another core. The model is a DLRM of Criteo's shape (bench.serve_load), asked over HTTP with raw tensors.

- Floor: `InferenceSession.run` alone in a loop on the server's core, with batches of the request's rows, while a
  process spins on the other core as the generator does. It is measured before each load: its speed
  differs by a third from minute to minute on shared machines.
- Both run before all others on their cores (a negative nice value, where root measures): the floor is processor time,
  and a kernel thread of 50 ms on the server's core would be counted as the server's latency.
- rows a second: the highest offered load of a ladder at which p99 stays below 10 ms and nothing is refused. Requests
  come as those of independent users do (a Poisson process), and in a second ladder with equal pauses.
- Bound: the load at which p99 were 10 ms if each request took the floor's time and no more: M/D/c (Crommelin,
  "Delay Probability Formulae When the Holding Times are Constant", 1932). Requests come as a Poisson process, each
  takes the same time, and the first that came is answered first, by the next of c cores that is free. It is simulated:
  where all take the same time, cores take requests in turns, so that each waits for the one that came c before it, and
  waiting times are a cumulated sum above its least value so far (Lindley, "The Theory of Queues with a Single Server",
  1952). A server that merges requests may exceed it, for a larger run may take less time a row than the floor's.
- rows a processor second: under a load that the server cannot answer in time, all its threads' time.
- curves: p50, p99, p99.9 at shares of the floor, requests of 64 rows: docs/serving.png.
- Python's overhead: processor time of the server a request less that in onnxruntime, one at a time and merged ones.

`--soak` is load for half an hour with a new version each minute: nothing lost, no mixed answer, memory flat. A model of
a table of a million rows (64 MB, mapped) has answers that are exact whole numbers: each answer is compared with what
the version that it names must say of all its rows. Each minute some rows change: a delta is written, applied and
released; the server takes it by itself. Figures go to build/bench/serve-soak.json, lines to the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import Figure, publish
from bench.serve_load import (
    STEP,
    TABLE_ROWS,
    LoadOutcome,
    ServerProcess,
    dlrm_inputs,
    prefer,
    request_of,
    run,
    served,
    write_dlrm,
    write_exact,
)
from headrace.config.installation import checkout
from headrace.export.serve.repository import push, push_deltas, write_delta
from headrace.storage import local

_QUEUE_REQUESTS = 2_000_000
#: Of the utilisation that is found.
_UTILISATION_PRECISION = 0.002


def queue_latencies(service: float, rate: float, cores: int, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Simulate seconds from a request's arrival to its answer, float64 [about count].

    Args:
        service: seconds of a request.
        rate: of requests, a second.
        cores: each of which serves one request at a time.
        count: of requests.
        seed: of arrivals.
    """
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    seconds = []
    for first in range(cores):
        pauses = np.diff(arrivals[first::cores])
        walk = np.concatenate(([0.0], np.cumsum(service - pauses)))
        seconds.append(walk - np.minimum.accumulate(walk) + service)
    return np.concatenate(seconds)


def highest_utilisation(service: float, limit: float, quantile: float, cores: int = 1) -> float:
    """Find the share of the cores' time at which a quantile of latency reaches a limit in seconds; 0: none does."""
    low, high = 0.0, 1.0
    while high - low > _UTILISATION_PRECISION:
        share = (low + high) / 2
        seconds = queue_latencies(service, share * cores / service, cores, _QUEUE_REQUESTS, 1)
        if np.quantile(seconds, quantile) < limit:
            low = share
        else:
            high = share
    return low


#: Okabe and Ito's, which colour-blind readers tell apart.
_LINES = (("p50", "p50", "#0072b2", "o"), ("p99", "p99", "#d55e00", "s"), ("p999", "p99.9", "#009e73", "^"))


def draw_latencies(curve: Path, picture: Path) -> None:
    """Draw three quantiles, the limit, and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    record = json.loads(curve.read_text())
    points, floor = record["points"], record["floor"]
    figure, axis = plt.subplots(figsize=(8.5, 4.6), constrained_layout=True)
    offered = [p["offered"] / 1e3 for p in points]
    for key, label, color, marker in _LINES:
        axis.plot(offered, [p[key] for p in points], color=color, marker=marker, markersize=4, label=label)
    bound = [p["bound99"] for p in points]
    axis.plot(offered, bound, color="#d55e00", linewidth=0.9, linestyle=":", label="p99, onnxruntime as M/D/1")
    refused = [(x, p["p999"]) for x, p in zip(offered, points, strict=True) if p["refused"]]
    if refused:
        axis.plot(*zip(*refused, strict=True), "x", color="#000000", markersize=9, label="some refused (503)")
    axis.axhline(10, color="#888888", linewidth=0.8, linestyle="--")
    axis.text(offered[-1], 10, "10 ms", va="bottom", ha="right", fontsize=8, color="#666666")
    axis.axvline(floor / 1e3, color="#888888", linewidth=0.8, linestyle="--")
    axis.text(floor / 1e3, 0.12, " onnxruntime alone,\n batches of 64", fontsize=8, color="#666666", va="bottom")
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.1)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.set_xlabel("offered load, thousands of rows a second, requests of 64 rows")
    axis.set_ylabel("latency, ms")
    axis.set_title(
        "headrace serve, a DLRM on one core: latency against offered load (open loop)", loc="left", fontsize=10
    )
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


BATCHES = (16, 64, 256, 1024)
#: Shares of the floor that are offered, and the first one.
LADDER = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1)
START = 0.5
CURVE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LIMIT_MS = 10.0
#: Of a load: what else runs on the machine may spoil one.
TRIES = 3
#: Of the floor and of the server, one after the other.
TURNS = 4
SECONDS, CURVE_SECONDS = 2.0, 4.0
#: Requests of a step of the ladder, of which p99 is a quantile, and seconds of it at the most.
REQUESTS, MOST_SECONDS = 3000, 4.0
SERVER_CORE, LOAD_CORE = 0, 1
HOME = checkout() / "build" / "bench" / "serve"


def main(batches: Sequence[int]) -> None:
    model = HOME / "models" / "dlrm" / "1"
    if not model.is_dir():
        model.parent.mkdir(parents=True, exist_ok=True)
        # In a process of its own, which frees torch's memory.
        subprocess.run([sys.executable, "-m", "bench.bench_serve", "--write", str(model)], check=True)
    os.sched_setaffinity(0, {LOAD_CORE})
    if not prefer():
        print("not root: what else runs on the machine takes its share of the server's core", flush=True)
    figures = []
    with served(HOME / "models", HOME / "server.log", [SERVER_CORE]) as server:
        sizes = {*batches, 16, 64}
        requests = {rows: [request_of("dlrm", dlrm_inputs(rows, seed)) for seed in range(16)] for rows in sizes}
        run(server.port, requests[64], 500, 2)  # warm
        for rows in batches:
            figures += highest(server, requests[rows], rows, model)
            figures.append(saturated(server, requests[rows], rows, model))
        alone = floor(model, 64)
        figures += overhead(server, requests)
        figures += over_grpc(server, alone)
        curve = [latencies(server, requests[64], share, alone) for share in CURVE]
        memory = server.memory()
    figures.append(Figure("onnxruntime alone, batches of 1024", floor(model, 1024), "rows/s"))
    figures.append(Figure("memory of the server, tables mapped", memory["anonymous"], "MiB"))
    (HOME / "curve.json").write_text(json.dumps({"floor": alone, "points": curve}, indent=1))
    draw_latencies(HOME / "curve.json", checkout() / "docs" / "serving.png")
    publish("serve", figures)


def floor(model: Path, rows: int, turns: int = 5) -> float:
    """Measure rows a second of onnxruntime alone, on the server's core, in a process of its own; this one spins."""
    command = [sys.executable, "-m", "bench.bench_serve", "--floor", str(model), str(rows), str(turns)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            pass
        assert process.stdout is not None
        return float(process.stdout.read())


def measure_floor(model: Path, rows: int, turns: int) -> float:
    """Measure rows a second of processor time, which others on the machine do not take from it: the best of some turns
    of a second.
    """
    import onnxruntime

    os.sched_setaffinity(0, {SERVER_CORE})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model / "model.onnx", options, providers=["CPUExecutionProvider"])
    batches = [dlrm_inputs(rows, seed) for seed in range(16)]
    best = 0.0
    for _ in range(turns):
        start, runs = time.process_time(), 0
        while time.process_time() - start < 1:
            session.run(["label"], batches[runs % 16])
            runs += 1
        best = max(best, runs * rows / (time.process_time() - start))
    return best


def highest(server: ServerProcess, requests: list[bytes], rows: int, model: Path) -> list[Figure]:
    """Measure the highest loads of the ladder that are answered in time, and what no server of this floor exceeds."""
    floors: list[float] = []
    shares = {paced: climb(server, requests, rows, model, paced, floors) for paced in (False, True)}
    alone = statistics.median(floors)
    bound = highest_utilisation(rows / alone, LIMIT_MS / 1e3, 0.99) * alone
    label = f"rows/s at p99 < 10 ms, requests of {rows} rows"
    return [
        Figure(label, shares[False] * alone, "rows/s", floor=alone, peer=bound),
        Figure(f"{label}, bound of any server", bound, "rows/s", floor=alone),
        Figure(f"{label} that come at equal pauses", shares[True] * alone, "rows/s", floor=alone),
    ]


def climb(
    server: ServerProcess, requests: list[bytes], rows: int, model: Path, paced: bool, floors: list[float]
) -> float:
    """Find the highest step's share of the floor: up from the middle as long as steps hold, or down to the first that
    does.

    `floors` gets those that were measured.
    """
    floors.append(floor(model, rows, 1))
    most = 1.0 if paced else highest_utilisation(rows / floors[-1], LIMIT_MS / 1e3, 0.99)
    start = max(i for i, share in enumerate(LADDER) if share <= min(START, most) or not i)
    best = LADDER[start] if holds(server, requests, rows, model, LADDER[start], paced, floors) else 0.0
    for share in LADDER[start + 1 :] if best else reversed(LADDER[:start]):
        is_held = holds(server, requests, rows, model, share, paced, floors)
        if is_held != bool(best):
            return share if is_held else best
        best = share if is_held else 0.0
    return best


def holds(
    server: ServerProcess, requests: list[bytes], rows: int, model: Path, share: float, paced: bool, floors: list[float]
) -> bool:
    """Return whether a step is answered in time, in one of some tries."""
    for _ in range(TRIES):
        floors.append(floor(model, rows, 1))
        rate = share * floors[-1] / rows
        outcome = run(server.port, requests, rate, min(max(SECONDS, REQUESTS / rate), MOST_SECONDS), paced=paced)
        say(rows, share, outcome, " at equal pauses" if paced else "")
        time.sleep(0.5)
        if outcome.ms(0.99) < LIMIT_MS and not (outcome.refused or outcome.failed or outcome.lost):
            return True
    return False


def saturated(server: ServerProcess, requests: list[bytes], rows: int, model: Path) -> Figure:
    """Measure the rows that a second of processor time answers while more is offered than can be; the floor in turns
    with it.
    """
    floors, answered = [], []
    for _ in range(TURNS):
        floors.append(floor(model, rows, 1))
        start_cpu = server.cpu_seconds()
        outcome = run(server.port, requests, floors[0] / rows, SECONDS)
        answered.append(len(outcome.latencies) * rows / (server.cpu_seconds() - start_cpu))
        say(rows, 1, outcome)
        time.sleep(0.7)
    name = f"rows per processor second, requests of {rows} rows, medians of {TURNS} turns"
    return Figure(name, statistics.median(answered), "rows/s", floor=statistics.median(floors))


def latencies(server: ServerProcess, requests: list[bytes], share: float, alone: float) -> dict[str, float]:
    """Measure a point of the curve."""
    outcome = run(server.port, requests, share * alone / 64, CURVE_SECONDS)
    say(64, share, outcome)
    time.sleep(0.5)
    quantiles = {name: outcome.ms(q) for name, q in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    bound = latencies(64 / alone, share * alone / 64, 1, 1_000_000, 1)
    quantiles["bound99"] = float(np.quantile(bound, 0.99)) * 1e3
    return {"offered": share * alone, "refused": outcome.refused, "lost": outcome.lost + outcome.failed, **quantiles}


def overhead(server: ServerProcess, requests: dict[int, list[bytes]]) -> list[Figure]:
    """Measure the processor time beside onnxruntime's, a request."""
    figures = []
    for name, rate, rows in (("one at a time", 200, 64), ("merged", 4000, 16)):
        start = server.cpu_seconds(), server.total("headrace_serve_run_seconds_total")
        outcome = run(server.port, requests[rows], rate, 5)
        cpu = server.cpu_seconds() - start[0]
        in_runs = server.total("headrace_serve_run_seconds_total") - start[1]
        each = (cpu - in_runs) / len(outcome.latencies) * 1e6
        figures.append(Figure(f"Python a request of {rows} rows, {name} ({rate}/s)", each, "us"))
        figures.append(
            Figure(f"onnxruntime a request of {rows} rows, {name}", in_runs / len(outcome.latencies) * 1e6, "us")
        )
    return figures


def over_grpc(server: ServerProcess, alone: float) -> list[Figure]:
    """Measure requests of 64 rows by gRPC, eight in flight (a closed loop), from a process on the other core."""
    command = [sys.executable, "-m", "bench.bench_serve", "--grpc", str(server.grpc_port)]
    rows = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [Figure("rows/s by gRPC, requests of 64 rows, 8 in flight", rows, "rows/s", floor=alone)]


def measure_grpc(port: int, seconds: float = 5.0) -> float:
    import asyncio

    import grpc

    from headrace.export.serve.grpc_service import message

    request = message("ModelInferRequest")(model_name="dlrm")
    types = {"i": "INT64", "f": "FP32"}
    for name, array in dlrm_inputs(64, 1).items():
        request.inputs.add(name=name, datatype=types[array.dtype.kind], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    data = request.SerializeToString()

    async def ask(channel: grpc.aio.Channel, until: float) -> int:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        count = 0
        while time.perf_counter() < until:
            await infer(data)
            count += 1
        return count

    async def load() -> float:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            start = time.perf_counter()
            counts = await asyncio.gather(*(ask(channel, start + seconds) for _ in range(8)))
            return sum(counts) * 64 / (time.perf_counter() - start)

    return asyncio.run(load())


def say(rows: int, share: float, outcome: LoadOutcome, how: str = "") -> None:
    bad = {k: v for k, v in vars(outcome).items() if k in ("refused", "failed", "lost") and v}
    quantiles = ", ".join(f"{n} {outcome.ms(q):.2f}" for n, q in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)))
    rate = len(outcome.latencies) * rows / outcome.seconds
    print(f"{rows} rows{how}, {share:.0%} of the floor: {rate:,.0f} rows/s, ms {quantiles} {bad or ''}", flush=True)


SOAK_ROWS, SOAK_BATCHES, CHANGED_ROWS = 64, 32, 1000
SOAK_HOME = checkout() / "build" / "bench" / "soak"


class ExpectedAnswers:
    """Answers that each version must give, and those that came."""

    def __init__(self, table: np.ndarray) -> None:
        rng = np.random.default_rng(2)
        self.users = [rng.integers(0, TABLE_ROWS, SOAK_ROWS) for _ in range(SOAK_BATCHES)]
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


def soak(arguments: Sequence[str]) -> None:
    """Offer load while new versions are pushed, and publish what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.bench_serve --soak")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=300, help="requests a second, of 64 rows")
    parser.add_argument("--switch-seconds", type=float, default=60)
    args = parser.parse_args(arguments)
    shutil.rmtree(SOAK_HOME, ignore_errors=True)
    SOAK_HOME.mkdir(parents=True)
    table = np.random.default_rng(1).integers(0, 100, (TABLE_ROWS, 16)).astype(np.float32)
    write_exact(SOAK_HOME / "first", 1, table)
    repository = local(SOAK_HOME / "models")
    push(repository, {"exact": local(SOAK_HOME / "first")})
    answers = ExpectedAnswers(table)
    memory: list[dict[str, float]] = []
    stop = threading.Event()
    with served(SOAK_HOME / "models", SOAK_HOME / "server.log", [0, 1], ["--poll-seconds", "1"]) as server:
        switching = threading.Thread(
            target=push_versions, args=(server, answers, table, args.switch_seconds, stop, memory)
        )
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


def push_versions(
    server: ServerProcess,
    answers: ExpectedAnswers,
    table: np.ndarray,
    seconds: float,
    stop: threading.Event,
    memory: list[dict[str, float]],
) -> None:
    """Push a new version each so many seconds, of the same table with some rows changed."""
    repository, rng, version = local(SOAK_HOME / "models"), np.random.default_rng(3), 1
    while not stop.wait(seconds):
        version += 1
        rows = rng.integers(0, TABLE_ROWS, CHANGED_ROWS)
        table[rows] = rng.integers(0, 100, (CHANGED_ROWS, 16)).astype(np.float32)
        answers.add(version, table)
        shutil.rmtree(SOAK_HOME / "new", ignore_errors=True)
        write_exact(SOAK_HOME / "new", version, table)
        size = write_delta(
            local(SOAK_HOME / "models" / "exact" / str(version - 1)),
            local(SOAK_HOME / "new"),
            local(SOAK_HOME / "delta"),
        )
        pushed = push_deltas(repository, {"exact": local(SOAK_HOME / "delta")}, keep=3)
        assert pushed == version, (pushed, version)
        memory.append(server.memory())
        memory_text = ", ".join(f"{k} {v:,.1f} MiB" for k, v in memory[-1].items())
        print(f"version {version}, a delta of {size:,} bytes; {memory_text}; wrong so far: {answers.wrong}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write", folder]:
            write_dlrm(Path(folder))
        case ["--soak", *words]:
            soak(words)
        case ["--draw", curve, picture]:
            draw_latencies(Path(curve), Path(picture))
        case ["--floor", folder, rows, turns]:
            print(measure_floor(Path(folder), int(rows), int(turns)))
        case ["--grpc", port]:
            print(measure_grpc(int(port)))
        case _:
            np.seterr(all="raise")
            main([int(rows) for rows in sys.argv[1:]] or BATCHES)
