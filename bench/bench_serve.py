"""`headrace serve`: latency against offered load, rows a second, and what Python costs beside onnxruntime.

    make bench-serve
    python -m bench.bench_serve 64 256       # requests of so many rows alone

The server has one core and one thread of onnxruntime, the generator of requests (bench.serve_load, an open loop)
another core. The model is a DLRM of Criteo's shape (bench.serve_models), asked over HTTP with raw tensors.

- Floor: `InferenceSession.run` alone in a loop on the server's core, with batches of the request's rows, while a
  process spins on the other core as the generator does. It is measured before each load: its speed
  differs by a third from minute to minute on shared machines.
- Both run before all others on their cores (a negative nice value, where root measures): the floor is processor time,
  and a kernel thread of 50 ms on the server's core would be counted as the server's latency.
- rows a second: the highest offered load of a ladder at which p99 stays below 10 ms and nothing is refused. Requests
  come as those of independent users do (a Poisson process), and in a second ladder with equal pauses.
- Bound: the load at which p99 were 10 ms if each request took the floor's time and no more (bench.serve_bound).
- rows a processor second: under a load that the server cannot answer in time, all its threads' time.
- curves: p50, p99, p99.9 at shares of the floor, requests of 64 rows: docs/serving.png.
- Python's overhead: processor time of the server a request less that in onnxruntime, one at a time and merged ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import serve_bound
from bench.report import Figure, publish
from bench.serve_load import LoadOutcome, request_of, run
from bench.serve_models import dlrm_inputs, write_dlrm
from bench.serve_process import ServerProcess, prefer, served
from headrace.workspace import checkout

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
    from bench.serve_plot import draw

    draw(HOME / "curve.json", checkout() / "docs" / "serving.png")
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
    bound = serve_bound.highest_utilisation(rows / alone, LIMIT_MS / 1e3, 0.99) * alone
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
    most = 1.0 if paced else serve_bound.highest_utilisation(rows / floors[-1], LIMIT_MS / 1e3, 0.99)
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
    bound = serve_bound.latencies(64 / alone, share * alone / 64, 1, 1_000_000, 1)
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


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write", folder]:
            write_dlrm(Path(folder))
        case ["--floor", folder, rows, turns]:
            print(measure_floor(Path(folder), int(rows), int(turns)))
        case ["--grpc", port]:
            print(measure_grpc(int(port)))
        case _:
            np.seterr(all="raise")
            main([int(rows) for rows in sys.argv[1:]] or BATCHES)
