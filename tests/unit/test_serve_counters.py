"""Connects, cancels, refusals, half-closed connections and errors in both protocols: what is counted and given back."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="httptools is not installed: run `make serve`")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
grpc = pytest.importorskip("grpc", reason="grpcio is not installed: run `make serve`")
import uvloop  # noqa: E402

from headrace.export.serve.grpc_service import SERVICE, make_server, message  # noqa: E402
from headrace.export.serve.http_connection import Shared  # noqa: E402
from headrace.export.serve.loader import ModelCatalogue, Release, ServedModel, Service  # noqa: E402
from headrace.export.serve.model import Batcher, Model  # noqa: E402
from headrace.export.serve.options import CLIENT_GONE, Metrics, RequestError, RequestLimits, ServeOptions  # noqa: E402
from headrace.export.serve.repository import VersionFolder, read_repository  # noqa: E402
from headrace.export.serve.server import HttpApp, taking  # noqa: E402
from headrace.export.serve.tensors import Array, TensorSpec  # noqa: E402

LIMITS = RequestLimits(body_bytes=6_000, pending_bytes=9_000, timeout=30.0, receive_seconds=30.0, connections=40)
#: First numbers of requests that the model refuses, and at which it fails.
REFUSED, FAILS = -1.0, -2.0
_STATUS = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.CANCELLED: CLIENT_GONE,
    grpc.StatusCode.DEADLINE_EXCEEDED: CLIENT_GONE,
}


class Gated(Model):
    """Sums of rows, when its gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        x, y = TensorSpec("x", "FP32", (-1, -1)), TensorSpec("y", "FP32", (-1,))
        super().__init__("m", 1, [x], [y], True)
        self._gate = gate

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        assert self._gate.wait(30)
        (x,) = feeds
        if (x[:, 0] == REFUSED).any():
            raise RequestError(400, "refused")
        if (x[:, 0] == FAILS).any():
            raise RuntimeError("fails")
        return [x.sum(axis=1)]


class Watched(Service):
    """A service that is asked after each step whether its limit was passed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken = 0

    def take_bytes(self, count: int) -> None:
        super().take_bytes(count)
        self.taken += 1
        assert 0 <= self.pending_bytes <= self.options.limits.pending_bytes

    def give_back(self, count: int) -> None:
        super().give_back(count)
        assert self.pending_bytes >= 0


class Site:
    """A server of both protocols in this process, and its clients."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.metrics = Metrics()
        self.expected: Counter[tuple[str, int]] = Counter()
        self.waiting: list[Callable[[], Awaitable[None]]] = []

    async def open(self, stack: AsyncExitStack) -> None:
        metrics = self.metrics.of_model("m", 1)
        self.batcher = Batcher(model := Gated(self.gate), LIMITS, stack.enter_context(ThreadPoolExecutor(1)), metrics)
        release = Release(VersionFolder("m", 1, Path(), ()), {"m": ServedModel(model, self.batcher, metrics)})
        loader = SimpleNamespace(catalogue=ModelCatalogue({"m": {1: release}}, {"m": 1}, {}, True))
        self.service = Watched(ServeOptions(Path(), limits=LIMITS), loader, self.metrics)
        self.shared = Shared(HttpApp(self.service), LIMITS)
        taken = socket.create_server(("127.0.0.1", 0))
        self.port = taken.getsockname()[1]
        await stack.enter_async_context(taking(self.shared, taken, None))
        server = make_server(self.service)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 5)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        self.call = channel.unary_unary(f"/{SERVICE}/ModelInfer")

    def counts(self) -> Counter[tuple[str, int]]:
        """Requests by protocol and status, as Prometheus is told."""
        (family,) = self.metrics.requests.collect()
        samples = ((s.labels, s.value) for s in family.samples if s.name.endswith("_total"))
        return Counter({(labels["protocol"], int(labels["status"])): int(n) for labels, n in samples})

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1_500):
            if condition():
                return
            await asyncio.sleep(0.002)
        raise AssertionError((self.counts(), self.expected, self.service.pending_bytes))

    def step(self) -> Callable[[], bool]:
        """Return whether a request that is sent after this call has been answered, or waits for its run."""
        state = (self.service.taken, self.counts().total())
        return lambda: (self.service.taken, self.counts().total()) != state

    async def http(self, data: bytes, answers: int, kind: str) -> None:
        """Send requests; `kind`: "read" the answers, when the gate is open; "half": the same, nothing more is sent;
        "go": reset the connection; "leave": close it, which a server cannot tell from "half".
        """
        counts_before, moved = self.counts(), self.step()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        if kind == "half":
            writer.write_eof()
        await self.until(lambda: moved() if answers else self.shared.connections)
        answered = self.counts() - counts_before

        async def read() -> None:
            for _ in range(answers):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                self.expected["http", int(head.split()[1])] += 1
            if kind == "half":
                assert await reader.read() == b""
            writer.close()

        if kind in ("read", "half"):
            self.waiting.append(read)
            return
        if kind == "leave":
            writer.close()
            self.expected += answered or Counter({("http", 200): 1})
            return
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        counted = answered or (Counter({("http", CLIENT_GONE): 1}) if answers else Counter())
        self.expected += counted
        await self.until(lambda: self.counts() - counts_before == counted)

    async def grpc(self, data: bytes, kind: str) -> None:
        """Send a request; `kind`: "read", "cancel" it, or let its "deadline" pass."""
        counts_before, moved = self.counts(), self.step()
        call = self.call(data, timeout=0.15 if kind == "deadline" else 30)
        task = asyncio.ensure_future(call.code())
        await self.until(moved)
        await asyncio.sleep(0.02)  # what needs no run is answered

        async def read() -> None:
            self.expected["grpc", _STATUS[await task]] += 1

        if kind == "read":
            self.waiting.append(read)
            return
        if kind == "cancel" and self.counts() == counts_before:
            call.cancel()
        await self.until(lambda: self.counts() != counts_before)
        await read()


def body_of(first: float, columns: int = 2, extra: str = "") -> bytes:
    data = json.dumps([first, *[1.0] * (columns - 1)])
    tensor = f'{{"name": "x", "datatype": "FP32", "shape": [1, {columns}], "data": {data}}}'
    return f'{{"inputs": [{tensor}]{extra}}}'.encode()


def post(body: bytes, path: str = "/v2/models/m/infer", more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes, coding: str) -> bytes:
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: {coding}\r\n\r\n{len(body):x}\r\n"
    return head.encode() + body + b"\r\n0\r\n\r\n"


def message_of(first: float, columns: int = 2, model: str = "m") -> bytes:
    request = message("ModelInferRequest")(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, columns])
    request.raw_input_contents.append(np.full(columns, first, np.float32).tobytes())
    data: bytes = request.SerializeToString()
    return data


GOOD, BIG = body_of(1.0), body_of(1.0, 700)
#: What is sent, and how many answers come.
HTTP = {
    "good": (post(GOOD), 1),
    "big": (post(BIG), 1),
    "two": (post(GOOD) * 2, 2),
    "three, one wrong": (post(GOOD) + post(b"{}") + post(GOOD), 3),
    "chunked": (chunked(GOOD, "chunked"), 1),
    "another coding": (chunked(GOOD, "gzip, chunked"), 1),
    "no JSON": (post(b"{"), 1),
    "infinite": (post(body_of(1.0).replace(b"[1.0", b"[1e999")), 1),
    "too large for its type": (post(body_of(1e39)), 1),
    "refused by the model": (post(body_of(REFUSED)), 1),
    "an error": (post(body_of(FAILS)), 1),
    "no such model": (post(GOOD, "/v2/models/other/infer"), 1),
    "too long": (post(b"x" * 6_001), 1),
    "health": (b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n", 1),
    "no HTTP": (b"\0\r\n\r\n", 1),
}
GRPC = {
    "good": message_of(1.0),
    "big": message_of(1.0, 1_400),
    "refused by the model": message_of(REFUSED),
    "an error": message_of(FAILS),
    "no such model": message_of(1.0, model="other"),
    "no message": b"\xff\xff",
}
ACTIONS = st.one_of(
    st.tuples(st.just("http"), st.sampled_from(sorted(HTTP)), st.sampled_from(["read", "half"])),
    st.tuples(st.just("http"), st.sampled_from(["good", "big", "chunked", "no JSON"]), st.just("go")),
    st.tuples(st.just("http"), st.sampled_from(["good", "chunked"]), st.just("leave")),
    st.tuples(st.just("http"), st.sampled_from(["half a body", "half a head", "nothing"]), st.just("go")),
    st.tuples(st.just("grpc"), st.sampled_from(sorted(GRPC)), st.sampled_from(["read", "read", "cancel", "deadline"])),
)


async def play(actions: list[tuple[str, str, str]]) -> None:
    site = Site()
    async with AsyncExitStack() as stack:
        await site.open(stack)
        for protocol, name, kind in actions:
            if protocol == "grpc":
                await site.grpc(GRPC[name], kind)
            elif name == "half a body":
                await site.http(post(GOOD)[:-20], 1, kind)
            elif name in ("half a head", "nothing"):
                await site.http(post(GOOD)[: 30 if name == "half a head" else 0], 0, kind)
            else:
                await site.http(*HTTP[name], kind)
        site.gate.set()
        await asyncio.gather(*(read() for read in site.waiting))
        await site.until(lambda: site.counts().total() >= site.expected.total() and not site.shared.connections)
        await site.until(lambda: site.batcher.idle and not site.shared.leaving)
        assert site.counts() == site.expected
        assert (site.service.pending_bytes, site.batcher.queued_rows) == (0, 0)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop_runner:
        yield loop_runner


@settings(max_examples=60)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=12))
def test_each_request_counts_once_and_gives_all_back(
    runner: asyncio.Runner, actions: list[tuple[str, str, str]]
) -> None:
    runner.run(play(actions))


@pytest.mark.parametrize("kind", ["read", "half"])
@pytest.mark.parametrize("name", sorted(HTTP))
def test_each_request_of_http(runner: asyncio.Runner, name: str, kind: str) -> None:
    runner.run(play([("http", name, kind)]))


@pytest.mark.parametrize("kind", ["read", "cancel", "deadline"])
@pytest.mark.parametrize("name", sorted(GRPC))
def test_each_request_of_grpc(runner: asyncio.Runner, name: str, kind: str) -> None:
    """One request before it fills the memory that requests may have."""
    runner.run(play([("grpc", "big", "read"), ("grpc", name, kind), ("grpc", "big", "read"), ("grpc", name, kind)]))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"HEAD /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"HEAD /v2/models/m/ready HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"HEAD /v2/models/other HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (post(GOOD).replace(b"POST", b"HEAD"), 405),
        (HTTP["infinite"][0], 400),
        (HTTP["too large for its type"][0], 400),
        (chunked(GOOD, "gzip, chunked"), 501),
        (chunked(GOOD, "identity\r\nTransfer-Encoding: chunked"), 501),
        (chunked(GOOD, "Chunked "), 200),
        (chunked(GOOD, "chunked").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    ],
)
def test_statuses(runner: asyncio.Runner, data: bytes, status: int) -> None:
    """A client that closes its side behind its request is counted, too; an answer to HEAD has no body."""

    async def ask() -> bytes:
        site = Site()
        site.gate.set()
        async with AsyncExitStack() as stack:
            await site.open(stack)
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(data)
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            await site.until(lambda: not site.shared.connections and not site.shared.leaving)
            assert site.counts() == {("http", status): 1}
        return answer

    head, _, body = runner.run(ask()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert (body == b"") == (data.startswith(b"HEAD"))


def test_tensors_of_a_request_whose_client_has_gone_are_freed_at_once(runner: asyncio.Runner) -> None:
    async def ask() -> None:
        gate, arrays = threading.Event(), [np.zeros((1, 2), np.float32) for _ in range(3)]
        with ThreadPoolExecutor(1) as runs:
            batcher = Batcher(Gated(gate), LIMITS, runs, Metrics().of_model("m", 1))
            answers = [batcher.submit([x[None]], 1, ("k",), 30.0) for x in arrays]  # type: ignore[arg-type]
            await asyncio.sleep(0.05)  # the run of all three has begun
            late = batcher.submit([arrays[0][None]], 1, ("k",), 30.0)  # type: ignore[arg-type]
            (waiting,) = batcher._queue
            assert batcher.queued_rows == 1
            late.cancel()
            answers[0].cancel()
            assert (batcher.queued_rows, list(waiting.blocks)) == (0, [])
            gate.set()
            await asyncio.wait_for(answers[1], 30)
            await asyncio.sleep(0.05)
            assert (batcher.idle, batcher.queued_rows) == (True, 0)

    runner.run(ask())


def test_a_link_to_itself_is_a_matter_of_its_version(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / "m" / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"x")
    (tmp_path / "m" / "2" / "loop").symlink_to("loop")
    (tmp_path / "m" / "2" / "up").symlink_to("..")
    contents = read_repository(tmp_path)
    assert sorted(contents.versions["m"]) == [1, 2]
    assert ("loop", -1, 0) in contents.versions["m"][2].signature
