"""Faults that must neither end a server nor go unanswered: torn repositories, bad requests, many clients."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
onnx = pytest.importorskip("onnx", reason="ONNX is not installed: run `make onnx`")
grpc = pytest.importorskip("grpc", reason="grpcio is not installed: run `make serve`")
from headrace.export.serve.grpc_service import message  # noqa: E402
from headrace.export.serve.options import RequestError  # noqa: E402
from tests.serve_support import Server, add_version, exact_graph, exact_inputs, expected, raw_request, running, tensors  # noqa: E402

RECEIVE_SECONDS = 2
CONNECTIONS = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    add_version(folder / "models", "exact", 1, exact_graph(1))
    limits = ["--max-body-mib", "8", "--receive-seconds", str(RECEIVE_SECONDS), "--poll-seconds", "0.05"]
    with running(folder / "models", folder / "log", *limits) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def _it_answers_afterwards(server: Server) -> Iterator[None]:
    yield
    answers(server)


def answers(server: Server) -> None:
    users, ages = exact_inputs(3, 1)
    status, answer = server.infer("exact", {"inputs": tensors(users, ages)})
    assert (status, answer["outputs"][0]["data"]) == (200, expected(1, users, ages).tolist()), answer
    assert server.process.poll() is None


USERS, AGES = exact_inputs(3, 1)
GOOD = tensors(USERS, AGES)
USER, AGE = GOOD


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"inputs": [*GOOD, {**AGE, "name": "colour"}]}, 400, "no input 'colour'; its inputs: user, age"),
        ({"inputs": [USER]}, 400, "needs the inputs: age"),
        ({"inputs": [USER, USER, AGE]}, 400, "'user' is given twice"),
        ({"inputs": [{**USER, "datatype": "FP32"}, AGE]}, 400, "expected INT64"),
        ({"inputs": [{**USER, "shape": [3, 1]}, AGE]}, 400, "expected [-1]"),
        ({"inputs": [USER, {**AGE, "shape": [3, 2]}]}, 400, "expected [-1, 1]"),
        ({"inputs": [{**USER, "shape": [2]}, AGE]}, 400, "3 values"),
        ({"inputs": [{**USER, "shape": [2], "data": [1, 2]}, AGE]}, 400, "different numbers of rows: user 2, age 3"),
        ({"inputs": [{**USER, "shape": [-1]}, AGE]}, 400, "list of lengths"),
        ({"inputs": [{**USER, "shape": [0], "data": []}, {**AGE, "shape": [0, 1], "data": []}]}, 400, "no rows"),
        ({"inputs": [{**USER, "data": [1, "2", 3]}, AGE]}, 400, "must be of the type INT64"),
        ({"inputs": [{**USER, "data": [1, 2, 2**70]}, AGE]}, 400, "'user'"),
        ({"inputs": [{**USER, "data": [1, 2, 3.5]}, AGE]}, 400, "must be of the type INT64"),
        ({"inputs": [{**USER, "data": [[1, 2], 3]}, AGE]}, 400, "no even lists"),
        ({"inputs": [{**USER, "data": [1, 2, 1_000_000]}, AGE]}, 400, "cannot compute"),
        ({"inputs": [USER, {**AGE, "data": [1, float("nan"), 2]}]}, 400, "'age' has a NaN at [1, 0]"),
        ({"inputs": [{**USER, "shape": [10**30]}, AGE]}, 400, "more than"),
        ({"inputs": [USER, {**AGE, "shape": [10**3000, 1]}]}, 400, "more than"),
        ({"inputs": [USER, {**AGE, "shape": [10**3000, 10**3000]}]}, 400, "expected [-1, 1]"),
        ({"inputs": [{**USER, "data": [1, True, 2]}, AGE]}, 400, "must be of the type INT64"),
        ({"inputs": GOOD, "parameters": {"timeout": -(10**400)}}, 400, "timeout"),
        ({"inputs": GOOD, "outputs": [{"name": "price"}]}, 400, "no output 'price'; its outputs: label"),
        ({"inputs": GOOD, "parameters": {"timeout": "soon"}}, 400, "timeout"),
        ({"inputs": 3}, 400, '"inputs"'),
        ([], 400, "must be an object"),
        (b"{", 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        (b"", 400, "no JSON"),
        (b"\xff\xfe", 400, "no JSON"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(server: Server, request_: Any, status: int, message: str) -> None:
    answer = server.infer("exact", request_)
    assert answer[0] == status, answer
    assert message in answer[1]["error"]


def test_wrong_paths_and_headers(server: Server) -> None:
    body, headers = raw_request(USERS, AGES)
    infer = "/v2/models/exact/infer"
    for method, path, data, sent, status in (
        ("GET", "/", None, {}, 404),
        ("GET", infer, None, {}, 405),
        ("POST", "/v2/models/nobody/infer", body, headers, 404),
        ("POST", "/v2/models/exact/versions/9/infer", body, headers, 404),
        ("POST", "/v2/models/exact/versions/../infer", body, headers, 404),
        ("GET", "/v2/models/" + "x" * 5000, None, {}, 404),
        ("POST", infer, body[:-1], headers, 400),
        ("POST", infer, body + b"0", headers, 400),
        ("POST", infer, body, {"Inference-Header-Content-Length": "999999"}, 400),
        ("POST", infer, body, {"Inference-Header-Content-Length": "-1"}, 400),
        ("POST", infer, body, {"Inference-Header-Content-Length": "1"}, 400),
        ("POST", infer, body, {**headers, "Content-Encoding": "gzip"}, 415),
        ("POST", "/v2/repository/models/exact/unload", b"", {}, 400),
    ):
        answer = server.request(method, path, data, sent)
        assert answer[0] == status, (method, path, answer)
        assert json.loads(answer[1])["error"]


def test_nan_among_raw_tensors(server: Server) -> None:
    ages = AGES.copy()
    ages[2] = np.nan
    body, headers = raw_request(USERS, ages)
    status, reply = server.request("POST", "/v2/models/exact/infer", body, headers)
    assert (status, "'age' has a NaN at [2, 0]" in json.loads(reply)["error"]) == (400, True)


def test_a_million_rows(server: Server) -> None:
    rows = 10**6
    status, reply = server.request(
        "POST", "/v2/models/exact/infer", *raw_request(np.zeros(rows, np.int64), np.zeros((rows, 1), np.float32))
    )
    assert (status, b"a request may have" in reply) == (413, True)
    rows = 600_000  # fits into a body
    body, headers = raw_request(np.zeros(rows, np.int64), np.zeros((rows, 1), np.float32))
    status, reply = server.request("POST", "/v2/models/exact/infer", body, headers)
    assert (status, b"600,000 rows; a request may have 65,536" in reply) == (413, True)
    status, answer = server.infer("exact", {"inputs": tensors(*exact_inputs(10**6, 1))})
    assert (status, "a request may have" in answer["error"]) == (413, True)
    most = exact_inputs(65_536, 1)
    body, headers = raw_request(*most)
    status, reply = server.request("POST", "/v2/models/exact/infer", body, headers)
    assert status == 200
    assert (np.frombuffer(reply[-65_536 * 4 :], np.float32) == expected(1, *most)).all()


def test_a_body_without_an_end(server: Server) -> None:
    """Its length is not said: it is refused when it has become too long."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(b"POST /v2/models/exact/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(20):
                s.sendall(b"%x\r\n" % (1 << 20) + b"0" * (1 << 20) + b"\r\n")
        with suppress(ConnectionError):
            assert s.recv(100).startswith(b"HTTP/1.1 413")


def test_slow_clients_lose_their_connection_and_hold_nobody_up(server: Server) -> None:
    starts = (
        b"",
        b"POST /v2/mod",
        b"POST /v2/models/exact/infer HTTP/1.1\r\nHost: x\r\nX-A: ",
        b"POST /v2/models/exact/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
    )
    with ExitStack() as stack:
        slow = []
        for start in starts * 20:
            s = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            s.sendall(start)
            slow.append((start, s))
        begin = time.monotonic()
        while time.monotonic() - begin < RECEIVE_SECONDS + 1:
            answers(server)
            for start, s in slow:
                if start:
                    with suppress(OSError):
                        s.send(b"a")
            time.sleep(0.2)
        for _, s in slow:
            received = b""
            with suppress(ConnectionResetError):
                while data := s.recv(1000):
                    received += data
            assert received == b"" or received.startswith(b"HTTP/1.1 408")


def test_a_header_without_an_end(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(b"GET / HTTP/1.1\r\n")
        received = b""
        with suppress(ConnectionError):
            for n in range(1000):
                s.sendall(b"X-%d: %s\r\n" % (n, b"a" * 1000))
            received = s.recv(1000)
        assert received == b"" or received.startswith(b"HTTP/1.1 431")


def test_a_thousand_connections_are_answered(server: Server) -> None:
    body, headers = raw_request(USERS, AGES)
    lines = "".join(f"{k}: {v}\r\n" for k, v in {**headers, "Content-Length": str(len(body)), "Host": "x"}.items())
    request = f"POST /v2/models/exact/infer HTTP/1.1\r\n{lines}\r\n".encode() + body
    labels = expected(1, USERS, AGES).tobytes()
    with ExitStack() as stack:
        clients = []
        for _ in range(CONNECTIONS):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)))
            clients[-1].sendall(request)
        for s in clients:
            received = s.recv(4096)
            while not received.endswith(labels):
                more = s.recv(4096)
                assert more, received
                received += more
            assert received.startswith(b"HTTP/1.1 200")


@settings(max_examples=150)
@given(data=st.binary(max_size=600), as_body=st.booleans(), header=st.integers(0, 700) | st.none())
def test_random_bytes(server: Server, data: bytes, as_body: bool, header: int | None) -> None:
    """The server answers them as a body by a 400; as a request, by a 400 or an end."""
    if as_body:
        headers = {} if header is None else {"Inference-Header-Content-Length": str(header)}
        status, reply = server.request("POST", "/v2/models/exact/infer", data, headers)
        assert (status, bool(json.loads(reply)["error"])) == (400, True)
        return
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        with suppress(ConnectionError):
            s.sendall(data)
            with suppress(OSError):  # not connected: the server has answered, and closed
                s.shutdown(socket.SHUT_WR)
            reply = s.recv(100)
            assert reply == b"" or reply.startswith(b"HTTP/1.1 4")


@settings(max_examples=150)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.integers(0, 10**6) | st.none())
def test_a_good_request_with_a_wrong_byte(server: Server, place: int, byte: int, cut: int | None) -> None:
    """The answer has numbers (the byte was in a number, or the same) or says what is wrong."""
    body, headers = raw_request(USERS, AGES)
    place %= len(body)
    body = body[:place] + bytes([byte]) + body[place + 1 :]
    if cut is not None:
        body = body[: cut % len(body)]
    status, reply = server.request("POST", "/v2/models/exact/infer", body, headers)
    assert status == 200 or (status in (400, 413) and json.loads(reply)["error"])


@settings(max_examples=60)
@given(data=st.binary(max_size=300), raw=st.lists(st.binary(max_size=40), max_size=4))
def test_random_bytes_by_grpc(server: Server, data: bytes, raw: list[bytes]) -> None:
    request = message("ModelInferRequest")(model_name="exact", raw_input_contents=raw)
    for tensor in GOOD:
        request.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        codes = grpc.StatusCode
        sizes_fit = [len(r) for r in raw] == [24, 12]
        assert code_of(infer, data) in (codes.INVALID_ARGUMENT, codes.NOT_FOUND)
        assert code_of(infer, request.SerializeToString()) == (codes.OK if sizes_fit else codes.INVALID_ARGUMENT)


def test_a_shape_whose_elements_overflow(server: Server) -> None:
    """The number of elements modulo 2^64 is that of the values."""
    from headrace.export.serve.grpc_service import _of_contents
    from headrace.export.serve.tensors import TensorSpec

    spec = TensorSpec("x", "INT64", (-1, -1))
    for shape in ((1 << 40, 1 << 40), (0, 1 << 40, 1 << 40)):
        with pytest.raises(RequestError, match="more than"):
            TensorSpec("x", "INT64", (-1,) * len(shape)).check("INT64", list(shape))
    with pytest.raises(RequestError, match="0 values"):
        _of_contents(spec, (1 << 40, 1 << 40), message("InferTensorContents")())


def test_requests_of_grpc_at_the_same_time() -> None:
    """Requests run as many as have room by their largest size, but 128 always, and never more than connections."""
    from headrace.export.serve.grpc_service import concurrent_requests
    from headrace.export.serve.options import RequestLimits

    mib = 1 << 20
    assert concurrent_requests(RequestLimits()) == 128
    assert concurrent_requests(RequestLimits(body_bytes=mib, pending_bytes=512 * mib)) == 256
    assert concurrent_requests(RequestLimits(connections=10)) == 10


def code_of(infer: Any, request: bytes) -> Any:
    try:
        infer(request, timeout=30)
    except grpc.RpcError as e:
        return e.code()
    return grpc.StatusCode.OK


def test_torn_versions_leave_what_was_served(server: Server) -> None:
    good = exact_graph(9).SerializeToString()
    newer = onnx.ModelProto.FromString(good)
    newer.ir_version = 99
    unknown = onnx.ModelProto.FromString(good)
    unknown.opset_import[0].version = 999
    foreign = onnx.ModelProto.FromString(good)
    foreign.graph.node[0].op_type = "NoSuchOperator"
    for version, (data, reason) in enumerate(
        (
            (good[: len(good) // 2], "onnxruntime"),
            (b"", "onnxruntime"),
            (b"no graph", "onnxruntime"),
            (newer.SerializeToString(), "IR version"),
            (unknown.SerializeToString(), "opset"),
            (foreign.SerializeToString(), "NoSuchOperator"),
        ),
        start=2,
    ):
        add_version(server.repository, "exact", version, data)
        assert reason in server.wait_for_failure("exact", version)
        answers(server)
    (server.repository / "exact" / "8").mkdir()
    assert "model.onnx" in server.wait_for_failure("exact", 8)
    # A record that names more than there is: a copy that was broken off.
    folder = server.repository / "exact" / "9"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(good)
    record = {"files": {"model.onnx": len(good), "table-0-0.bin": 10}, "graphs": {}}
    (folder / "export.json").write_text(json.dumps(record))
    assert "table-0-0.bin is missing" in server.wait_for_failure("exact", 9)
    (folder / "table-0-0.bin").write_bytes(b"012345")
    time.sleep(0.3)
    assert "6 bytes; export.json says 10" in server.wait_for_failure("exact", 9)
    folder = server.repository / "exact" / "10"
    folder.mkdir()
    (folder / "export.json").write_text(json.dumps({"format": "torch", "graphs": {}}))
    assert "format torch" in server.wait_for_failure("exact", 10)
    answers(server)
    for version in range(2, 11):
        shutil.rmtree(server.repository / "exact" / str(version))


def test_tables_outside_the_version(server: Server) -> None:
    """A graph that names a file of another folder is not loaded."""
    graph = exact_graph(1)
    table = next(t for t in graph.graph.initializer if t.name == "table")
    table.ClearField("raw_data")
    table.data_location = onnx.TensorProto.EXTERNAL
    table.external_data.add(key="location", value="../../../log")
    folder = add_version(server.repository, "exact", 2, graph)
    assert server.wait_for_failure("exact", 2)
    answers(server)
    shutil.rmtree(folder)


def test_a_repository_that_goes_and_comes(server: Server) -> None:
    aside = server.repository.with_name("aside")
    server.repository.rename(aside)
    time.sleep(0.3)
    answers(server)
    aside.rename(server.repository)
    (server.repository / "release.json").write_text('{"models": {"exact": "x"}}')
    time.sleep(0.3)
    answers(server)
    (server.repository / "release.json").unlink()


def test_more_than_may_wait_is_refused_at_once(tmp_path: Path) -> None:
    """The server lets 256 rows of 60 requests at the same moment wait: the others are answered 503."""
    add_version(tmp_path / "models", "exact", 1, exact_graph(1))
    body, headers = raw_request(*exact_inputs(64, 1))
    lines = "".join(f"{k}: {v}\r\n" for k, v in {**headers, "Content-Length": str(len(body)), "Host": "x"}.items())
    request = f"POST /v2/models/exact/infer HTTP/1.1\r\n{lines}\r\n".encode() + body
    limits = ["--max-rows", "64", "--timeout-ms", "60000"]
    with running(tmp_path / "models", tmp_path / "log", *limits) as server, ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        clients = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(60)]
        answers(server)
        server.process.send_signal(signal.SIGSTOP)
        for s in clients:
            s.sendall(request)
        server.process.send_signal(signal.SIGCONT)
        replies = [s.recv(4096) for s in clients]
        assert {x[:12] for x in replies} == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        refused = [x for x in replies if x.startswith(b"HTTP/1.1 503")]
        assert all(b"retry-after: 1" in x for x in refused)
        counted = f'headrace_serve_refused_requests_total{{model="exact",version="1"}} {len(refused)}.0'
        assert counted in server.get("/metrics")[1].decode()
        answers(server)
