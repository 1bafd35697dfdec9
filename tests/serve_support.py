"""Graphs small enough to be checked by hand, and a server of its own process."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace.storage import local

USERS = 1000
#: What a version adds to every answer; sums of whole numbers below 2^24 are exact in float32, however they are merged.
STEP = 1000
TABLE = np.random.default_rng(0).integers(0, 100, (USERS, 4)).astype(np.float32)


def exact_graph(version: int, opset: int = 17) -> onnx.ModelProto:
    """label[row] = sum of the row's user's 4 numbers + age + version * STEP."""
    nodes = [
        helper.make_node("Gather", ["table", "user"], ["rows"], axis=0),
        helper.make_node("ReduceSum", ["rows", "axis"], ["of_user"], keepdims=0),
        helper.make_node("ReduceSum", ["age", "axis"], ["of_age"], keepdims=0),
        helper.make_node("Add", ["of_user", "of_age"], ["sum"]),
        helper.make_node("Add", ["sum", "version"], ["label"]),
    ]
    inputs = [
        helper.make_tensor_value_info("user", TensorProto.INT64, ["rows"]),
        helper.make_tensor_value_info("age", TensorProto.FLOAT, ["rows", 1]),
    ]
    outputs = [helper.make_tensor_value_info("label", TensorProto.FLOAT, ["rows"])]
    constants = {"table": TABLE, "axis": np.array([1]), "version": np.float32(version * STEP)}
    initializers = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "exact", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def expected(version: int, users: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """Compute by NumPy what `exact_graph` answers."""
    return TABLE[users].sum(axis=1) + ages[:, 0] + np.float32(version * STEP)


def network_graph(seed: int = 1) -> onnx.ModelProto:
    """Two layers over [rows, 8] and the mean of a list, whose numbers are no whole ones; a string goes through."""
    rng = np.random.default_rng(seed)
    constants = {
        "w1": rng.normal(size=(16, 32)).astype(np.float32),
        "w2": rng.normal(size=(32, 2)).astype(np.float32),
        "table": rng.normal(size=(50, 8)).astype(np.float32),
        "axis": np.array([1]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "tags"], ["found"], axis=0),
        helper.make_node("ReduceMean", ["found"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Concat", ["numbers", "mean"], ["x"], axis=1),
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "w2"], ["scores"]),
        helper.make_node("Identity", ["name"], ["said"]),
    ]
    inputs = [
        helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["rows", 8]),
        helper.make_tensor_value_info("tags", TensorProto.INT64, ["rows", "length"]),
        helper.make_tensor_value_info("name", TensorProto.STRING, ["rows"]),
    ]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 2]),
        helper.make_tensor_value_info("said", TensorProto.STRING, ["rows"]),
    ]
    initializers = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "network", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def add_export(repository: Path, model: str, version: int) -> dict[str, np.ndarray]:
    """An export of a model in retrieval form with its features: what its parts compute with.

    features: text and a number (NaN is missing, and becomes -1) to `tag` and `size`; query: `tag`'s vector; items: 300.
    """
    rng = np.random.default_rng(5)
    vectors, items = (rng.integers(-9, 9, (n, 4)).astype(np.float32) for n in (3, 300))
    keys = {"keys_strings": ["red", "blue"], "values_int64s": [1, 2], "default_int64": 0}
    vocabulary = helper.make_node("LabelEncoder", ["colour"], ["tag.feature"], domain="ai.onnx.ml", **keys)
    missing = helper.make_node("IsNaN", ["raw"], ["missing"])
    fill = helper.make_node("Where", ["missing", "minus", "raw"], ["size.feature"])
    minus = numpy_helper.from_array(np.float32(-1), "minus")
    raw = _tensors(("colour", TensorProto.STRING, ["rows"]), ("raw", TensorProto.FLOAT, ["rows", 1]))
    feature_tensors = _tensors(
        ("tag.feature", TensorProto.INT64, ["rows"]), ("size.feature", TensorProto.FLOAT, ["rows", 1])
    )
    rows = _tensors(("size", TensorProto.FLOAT, ["rows", 1]), ("tag", TensorProto.INT64, ["rows"]))
    gather = helper.make_node("Gather", ["vectors", "tag"], ["query_vector"], axis=0)
    table, axis = numpy_helper.from_array(vectors, "vectors"), numpy_helper.from_array(np.array([1]), "axis")
    total = helper.make_node("ReduceSum", ["query_vector", "axis"], ["sum"], keepdims=1)
    label = [
        helper.make_node("Add", ["sum", "size"], ["both"]),
        helper.make_node("Squeeze", ["both", "axis"], ["label"]),
    ]
    vector = _tensors(("query_vector", TensorProto.FLOAT, ["rows", 4]))
    graphs = {
        "features": ([vocabulary, missing, fill], raw, feature_tensors, [minus]),
        "query": ([gather], rows[1:], vector, [table]),
        "model": ([gather, total, *label], rows, _tensors(("label", TensorProto.FLOAT, ["rows"])), [table, axis]),
    }
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    with local(repository / model / str(version)).new_folder() as new:
        for name, (nodes, inputs, outputs, constants) in graphs.items():
            graph = helper.make_graph(nodes, name, inputs, outputs, constants)
            (new / f"{name}.onnx").put_bytes(
                helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
            )
        np.save(str(new / "items.npy"), items)
        fields = {
            "graphs": {name: {"file": f"{name}.onnx"} for name in graphs},
            "items": {"file": "items.npy", "first_code": 2},
        }
        (new / "export.json").put_text(json.dumps({**fields, "files": {f.name: f.size() for f in new.files()}}))
    return {"vectors": vectors, "items": items}


def _tensors(*specs: tuple[str, int, list[Any]]) -> list[Any]:
    return [helper.make_tensor_value_info(*spec) for spec in specs]


def add_version(repository: Path, model: str, version: int, graph: onnx.ModelProto | bytes) -> Path:
    """Add a version as a publisher does: the folder appears whole."""
    folder = repository / model / str(version)
    with local(folder).new_folder() as new:
        data = graph if isinstance(graph, bytes) else graph.SerializeToString()
        (new / "model.onnx").put_bytes(data)
    return folder


class Server:
    """`headrace serve` of a process of its own."""

    def __init__(self, repository: Path, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.repository, self.log = repository, log
        command = [sys.executable, "-m", "headrace.cli", "serve", str(repository), "--port", "0", "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [*command, "--threads", "1", *arguments], stdout=log.open("wb"), stderr=subprocess.STDOUT, env=env
        )
        match = self._wait_for(lambda: re.search(r"HTTP (https?)://127.0.0.1:(\d+), gRPC 127.0.0.1:(\d+)", self.text()))
        self.scheme, self.port, self.grpc_port = match[1], int(match[2]), int(match[3])

    def text(self) -> str:
        return self.log.read_text().replace("\n", " ")

    def _wait_for(self, condition: Any, seconds: float = 60) -> Any:
        until = time.monotonic() + seconds
        while not (result := condition()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until, self.text()
            time.sleep(0.02)
        return result

    def wait_for_version(self, model: str, version: int) -> None:
        """Until it answers where none is named."""
        self._wait_for(lambda: f'current_version{{model="{model}"}} {version}.0' in self.get("/metrics")[1].decode())

    def wait_for_failure(self, model: str, version: int) -> str:
        """Until the server has tried it; why it could not."""

        def reason() -> str | None:
            for entry in json.loads(self.request("POST", "/v2/repository/index", b"")[1]):
                if entry["name"] == model and entry["version"] == str(version) and entry["reason"] != "unloaded":
                    return str(entry["reason"])
            return None

        return str(self._wait_for(reason))

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def infer(self, model: str, request: Any) -> tuple[int, dict[str, Any]]:
        """Send a request as JSON, and return the status and the answer."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        status, answer = self.request("POST", f"/v2/models/{model}/infer", body)
        return status, json.loads(answer)

    def close(self) -> None:
        """End the server as its supervisor does."""
        self.process.terminate()
        try:
            assert self.process.wait(60) == 0, self.text()
        finally:
            self.process.kill()


@contextmanager
def running(repository: Path, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    server = Server(repository, log, *arguments, env=env)
    try:
        yield server
    finally:
        server.close()


def tensors(users: np.ndarray, ages: np.ndarray) -> list[dict[str, Any]]:
    """Inputs of `exact_graph` as JSON."""
    return [
        {"name": "user", "datatype": "INT64", "shape": list(users.shape), "data": users.tolist()},
        {"name": "age", "datatype": "FP32", "shape": list(ages.shape), "data": ages.ravel().tolist()},
    ]


def raw_request(users: np.ndarray, ages: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """Body and headers for `exact_graph`, its tensors raw, its answer raw too."""
    inputs = []
    for name, datatype, array in (("user", "INT64", users), ("age", "FP32", ages)):
        parameters = {"binary_data_size": array.nbytes}
        inputs.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": parameters})
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + users.tobytes() + ages.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


def exact_inputs(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Users int64 [rows] and ages float32 [rows, 1], whole numbers."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, USERS, rows), rng.integers(0, 100, (rows, 1)).astype(np.float32)
