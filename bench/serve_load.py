"""Load on `headrace serve`: models to ask, the server as a process on chosen cores, and requests in an open loop.

Requests are sent at given moments, whether those before have been answered or not. A request's latency counts from the
moment at which it was to be sent, so that a server that stalls is charged for all that would have come meanwhile (no
coordinated omission). One process, which spins: moments are met within microseconds.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from headrace import config
from headrace.comm.base import LocalCollective
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import local

#: Criteo's columns: 13 numbers, 26 codes; tables of 50,000 rows of 16 numbers.
NUMBERS, CODES, CARDINALITY, DIM = 13, 26, 50_000, 16
#: Of the exact model.
TABLE_ROWS, STEP = 1_000_000, 1000


def write_dlrm(folder: Path) -> None:
    """Write a DLRM with layers of 64, 16 and 256, 128 as an export."""
    from headrace.export.onnx_model import write_onnx

    features = [Feature(name=f"i{n}", kind=Kind.CONTINUOUS, dtype="float32") for n in range(NUMBERS)]
    features += [
        Feature(name=f"c{n}", kind=Kind.CATEGORICAL, dtype="int32", cardinality=CARDINALITY) for n in range(CODES)
    ]
    schema = DatasetSchema(features=(*features, Feature(name="click", kind=Kind.LABEL, dtype="float32")))
    spec = config.Model.model_validate(
        {"class": "dlrm", "embedding_dim": DIM, "bottom_mlp": (64, 16), "top_mlp": (256, 128)}
    )
    model = ShardedModel(schema, spec, LocalCollective(), 1).eval()
    fields = {"pipeline": "bench", "ds": "2026-01-01", "key": "k", "metrics": {}, "seed": 1, "files": ()}
    card = ModelCard(kind="dlrm", model=spec, schema=schema, tasks={}, **fields)  # type: ignore[arg-type]
    with local(folder).new_folder() as new:
        write_onnx(model, card, new, "fp32")


def dlrm_inputs(rows: int, seed: int) -> dict[str, npt.NDArray[np.generic]]:
    """Draw inputs of the DLRM, codes by Zipf(1.05)."""
    rng = np.random.default_rng(seed)
    numbers = {f"i{n}": rng.normal(size=(rows, 1)).astype(np.float32) for n in range(NUMBERS)}
    return numbers | {f"c{n}": rng.zipf(1.05 + 1e-3, rows) % CARDINALITY for n in range(CODES)}


def write_exact(folder: Path, version: int, table: npt.NDArray[np.float32]) -> None:
    """Write a model with label[row] = sum of the 16 whole numbers of the row's user + version * STEP; the table is
    beside the graph.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Gather", ["table", "user"], ["rows"], axis=0),
        helper.make_node("ReduceSum", ["rows", "axis"], ["sum"], keepdims=0),
        helper.make_node("Add", ["sum", "version"], ["label"]),
    ]
    of_table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=table.shape)
    of_table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "table-0-0.bin"), ("offset", "0"), ("length", str(table.nbytes))):
        of_table.external_data.add(key=key, value=value)
    constants = {"axis": np.array([1]), "version": np.float32(version * STEP)}
    initializers = [of_table, *(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())]
    inputs = [helper.make_tensor_value_info("user", TensorProto.INT64, ["rows"])]
    outputs = [helper.make_tensor_value_info("label", TensorProto.FLOAT, ["rows"])]
    graph = helper.make_graph(nodes, "exact", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with local(folder).new_folder() as new:
        onnx.save(model, str(new / "model.onnx"))
        table.tofile(new / "table-0-0.bin")


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


_TYPES = {"i": "INT64", "f": "FP32"}
#: Seconds after the last request within which answers still count.
_REST = 5.0


@dataclass
class LoadOutcome:
    """Outcome of a load.

    Attributes:
        latencies: seconds of answers, float64.
        refused: answered 503.
        failed: answered otherwise.
        lost: never answered.
        seconds: from the first moment to the last answer.
    """

    latencies: npt.NDArray[np.float64]
    refused: int
    failed: int
    lost: int
    seconds: float

    def ms(self, share: float) -> float:
        """Return a quantile of latency in milliseconds."""
        return float(np.quantile(self.latencies, share)) * 1e3 if len(self.latencies) else float("inf")


def request_of(model: str, tensors: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Return a whole HTTP request with raw tensors."""
    inputs = []
    for name, array in tensors.items():
        parameters = {"binary_data_size": array.nbytes}
        tensor = {"name": name, "datatype": _TYPES[array.dtype.kind], "shape": list(array.shape)}
        inputs.append({**tensor, "parameters": parameters})
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = header + b"".join(x.tobytes() for x in tensors.values())
    lines = f"Host: bench\r\nContent-Length: {len(body)}\r\nInference-Header-Content-Length: {len(header)}\r\n\r\n"
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\n{lines}".encode() + body


@dataclass
class _Client:
    socket: socket.socket
    due: float = 0.0
    request_index: int = 0
    got: bytearray = field(default_factory=bytearray)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    waiting: bool = False
    idle: bool = True


def moments(rate: float, seconds: float, seed: int, paced: bool) -> npt.NDArray[np.float64]:
    """Return the arrivals of requests, in seconds.

    Independent users have exponential pauses (a Poisson process); a paced sender has equal ones.
    """
    if paced:
        return np.arange(int(rate * seconds)) / rate
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.2) + 10))
    return arrivals[arrivals < seconds]


def run(
    port: int,
    requests: list[bytes],
    rate: float,
    seconds: float,
    clients: int = 256,
    seed: int = 1,
    check: Callable[[int, bytes, bytes], None] | None = None,
    spin: bool = True,
    paced: bool = False,
) -> LoadOutcome:
    """Send requests in turn at the moments of `moments`.

    Args:
        port: of HTTP on this host.
        requests: whole ones, see `request_of`.
        rate: of them, a second.
        seconds: of sending.
        clients: connections; a request for which none is free waits, and its latency counts.
        seed: of the moments.
        check: called with the request's index, the head and the body of each answer of 200.
        spin: False: wait between moments by milliseconds, for a load that leaves the processor to others.
        paced: see `moments`.
    """
    due = moments(rate, seconds, seed, paced)
    poll = select.epoll()
    by_fd: dict[int, _Client] = {}
    for _ in range(clients):
        s = socket.create_connection(("127.0.0.1", port))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.setblocking(False)
        by_fd[s.fileno()] = _Client(s)
        poll.register(s, select.EPOLLIN)
    free = deque(by_fd.values())
    latencies: list[float] = []
    sent = refused = failed = busy = 0
    start = time.perf_counter() + 0.05
    end = start + seconds + _REST
    while (sent < len(due) or busy) and (now := time.perf_counter()) < end:
        while sent < len(due) and free and start + due[sent] <= now:
            client = free.popleft()
            client.due, client.request_index, client.got = start + due[sent], sent % len(requests), bytearray()
            client.idle = False
            _send(client, requests[client.request_index], poll)
            sent += 1
            busy += 1
        for fd, event in poll.poll(0 if spin else 0.001):
            client = by_fd[fd]
            if event & select.EPOLLOUT:
                _send_rest(client, poll)
            if not event & ~select.EPOLLOUT:
                continue
            answer = _received(client)
            if answer is None:
                continue
            if client.idle:  # the server has closed what nobody used
                poll.unregister(client.socket)
                free.remove(client)
                continue
            client.idle = True
            head, body = answer
            busy -= 1
            if head.startswith(b"HTTP/1.1 200"):
                latencies.append(time.perf_counter() - client.due)
                if check is not None:
                    check(client.request_index, head, body)
            elif head.startswith(b"HTTP/1.1 503"):
                refused += 1
            else:
                failed += 1
            if head:
                free.append(client)
    taken = time.perf_counter() - start
    for client in by_fd.values():
        client.socket.close()
    poll.close()
    lost = len(due) - len(latencies) - refused - failed
    return LoadOutcome(np.array(latencies), refused, failed, lost, taken)


def _send(client: _Client, request: bytes, poll: select.epoll) -> None:
    client.rest = memoryview(request)
    _send_rest(client, poll)


def _send_rest(client: _Client, poll: select.epoll) -> None:
    with suppress(BlockingIOError):
        client.rest = client.rest[client.socket.send(client.rest) :]
    if bool(client.rest) != client.waiting:
        client.waiting = bool(client.rest)
        poll.modify(client.socket, select.EPOLLIN | (select.EPOLLOUT if client.waiting else 0))


def _received(client: _Client) -> tuple[bytes, bytes] | None:
    """Return an answer's head and body; None: not all of it is there. Empty: the connection was closed."""
    try:
        data = client.socket.recv(1 << 18)
    except (BlockingIOError, ConnectionError):
        data = b""
    if not data:
        return b"", b""
    client.got += data
    end = client.got.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(client.got[:end]).lower().replace(b"http/", b"HTTP/")
    length = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
    if len(client.got) < end + 4 + length:
        return None
    return head, bytes(client.got[end + 4 :])
