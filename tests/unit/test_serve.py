"""`headrace serve` asked by Triton's own client, over HTTP and gRPC, against onnxruntime asked directly."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.cli import app

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("onnx", reason="ONNX is not installed: run `make onnx`")
pytest.importorskip("grpc", reason="grpcio is not installed: run `make serve`")
over_http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed: run `make serve`")
over_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: run `make serve`")
from tests.certificates import self_signed  # noqa: E402
from tests.serve_support import (  # noqa: E402
    Server,
    add_export,
    add_version,
    exact_graph,
    exact_inputs,
    expected,
    network_graph,
    raw_request,
    running,
    tensors,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    add_version(folder / "models", "exact", 1, exact_graph(1))
    add_version(folder / "models", "exact", 2, exact_graph(2))
    add_version(folder / "models", "network", 7, network_graph())
    add_export(folder / "models", "shop", 3)
    with running(folder / "models", folder / "log", "--versions", "2", "--poll-seconds", "0.2") as running_server:
        yield running_server


@pytest.fixture(params=["http", "grpc"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    module = over_http if request.param == "http" else over_grpc
    port = server.port if request.param == "http" else server.grpc_port
    triton = module.InferenceServerClient(f"127.0.0.1:{port}")
    yield module, triton
    triton.close()


def network_inputs(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    letters = [rng.integers(32, 0x2FF, rng.integers(0, 9)) for _ in range(rows)]
    names = np.array(["".join(map(chr, x)) for x in letters], object)
    numbers = rng.normal(size=(rows, 8)).astype(np.float32)
    return {"numbers": numbers, "tags": rng.integers(0, 50, (rows, int(rng.integers(1, 9)))), "name": names}


def inputs_of(module: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    types = {"i": "INT64", "f": "FP32", "O": "BYTES"}
    infer_inputs = []
    for name, array in arrays.items():
        infer_inputs.append(module.InferInput(name, list(array.shape), types[array.dtype.kind]))
        infer_inputs[-1].set_data_from_numpy(array)
    return infer_inputs


def test_tritons_client_gets_what_onnxruntime_gives(server: Server, client: tuple[Any, Any]) -> None:
    module, triton = client
    session = onnxruntime.InferenceSession(network_graph().SerializeToString(), providers=["CPUExecutionProvider"])
    for rows in (1, 3, 64, 1000):
        inputs = network_inputs(rows, rows)
        scores, names = session.run(["scores", "said"], inputs)
        answer = triton.infer("network", inputs_of(module, inputs), request_id=f"of {rows}")
        np.testing.assert_allclose(answer.as_numpy("scores"), scores, rtol=1e-6, atol=1e-6)
        assert [n.decode() for n in answer.as_numpy("said")] == list(names) == list(inputs["name"])
    only = [module.InferRequestedOutput("scores")]
    answer = triton.infer("network", inputs_of(module, network_inputs(3, 3)), outputs=only)
    assert answer.as_numpy("said") is None
    assert answer.as_numpy("scores").shape == (3, 2)


def test_json_of_tritons_client(server: Server) -> None:
    users, ages = exact_inputs(5, 1)
    inputs = [over_http.InferInput("user", [5], "INT64"), over_http.InferInput("age", [5, 1], "FP32")]
    for tensor, array in zip(inputs, (users, ages), strict=True):
        tensor.set_data_from_numpy(array, binary_data=False)
    triton = over_http.InferenceServerClient(f"127.0.0.1:{server.port}")
    answer = triton.infer("exact", inputs, outputs=[over_http.InferRequestedOutput("label", binary_data=False)])
    assert answer.get_response()["outputs"][0]["data"] == expected(2, users, ages).tolist()


def test_typed_contents_of_grpc(server: Server) -> None:
    """tritonclient sends raw tensors only; others' clients send typed ones."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    users, ages = exact_inputs(5, 1)
    request = service_pb2.ModelInferRequest(model_name="exact", id="a")
    for name, datatype, array in (("user", "INT64", users), ("age", "FP32", ages)):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        field = "int64_contents" if datatype == "INT64" else "fp32_contents"
        getattr(tensor.contents, field).extend(array.ravel().tolist())
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == expected(2, users, ages).tolist()
    assert (answer.model_version, answer.id) == ("2", "a")


def test_versions_and_metadata(server: Server, client: tuple[Any, Any]) -> None:
    module, triton = client
    users, ages = exact_inputs(4, 2)
    inputs = inputs_of(module, {"user": users, "age": ages})
    for version, meant in (("", 2), ("1", 1), ("2", 2)):
        answer = triton.infer("exact", inputs, model_version=version)
        assert answer.as_numpy("label").tolist() == expected(meant, users, ages).tolist()
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("exact")
    assert triton.is_model_ready("exact", "1")
    assert not triton.is_model_ready("exact", "3")
    as_json = {"as_json": True} if module is over_grpc else {}
    metadata = triton.get_model_metadata("exact", **as_json)
    shapes = [[int(n) for n in x["shape"]] for x in metadata["inputs"]]
    assert [x["name"] for x in metadata["inputs"]] == ["user", "age"]
    assert (shapes, metadata["versions"]) == ([[-1], [-1, 1]], ["1", "2"])
    config = triton.get_model_config("exact", **as_json)
    config = config.get("config", config)
    assert [x["data_type"] for x in config["input"]] == ["TYPE_INT64", "TYPE_FP32"]
    assert [x.get("dims", []) for x in config["input"]] in ([[], [1]], [[], ["1"]])
    assert triton.get_server_metadata(**as_json)["name"] == "headrace"
    index = triton.get_model_repository_index(**as_json)
    models = index if module is over_http else index["models"]
    ready = {(m["name"], m["version"]) for m in models if m["state"] == "READY"}
    assert {("exact", "1"), ("exact", "2"), ("network", "7")} <= ready


def test_an_export_answers_raw_columns_and_finds_items(server: Server, tmp_path: Path, client: tuple[Any, Any]) -> None:
    module, triton = client
    parts = add_export(tmp_path, "shop", 3)
    raw = {"colour": np.array(["blue", "none", "red"], object), "raw": np.array([[2], [np.nan], [5]], np.float32)}
    tags, sizes = np.array([2, 0, 1]), np.array([[2], [-1], [5]], np.float32)
    label = parts["vectors"][tags].sum(axis=1) + sizes[:, 0]
    assert triton.infer("shop", inputs_of(module, raw)).as_numpy("label").tolist() == label.tolist()
    rows = {"tag": tags, "size": sizes}
    assert triton.infer("shop.model", inputs_of(module, rows)).as_numpy("label").tolist() == label.tolist()
    answer = triton.infer("shop.features", inputs_of(module, raw))
    assert answer.as_numpy("tag.feature").tolist() == tags.tolist()
    with pytest.raises(module.InferenceServerException, match="NaN"):
        triton.infer("shop.model", inputs_of(module, {"tag": tags, "size": np.full((3, 1), np.nan, np.float32)}))
    answer = triton.infer("shop.retrieve", inputs_of(module, raw))
    for i, tag in enumerate(tags):
        scores = {code: float(parts["vectors"][tag] @ parts["items"][code]) for code in range(2, 300)}
        best = sorted(scores, key=lambda code: (-scores[code], code))[:100]
        assert answer.as_numpy("item_row")[i].tolist() == best
        assert answer.as_numpy("item_score")[i].tolist() == [scores[code] for code in best]


def test_each_of_many_requests_at_once_gets_its_own_rows(server: Server) -> None:
    triton = over_http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=32)
    waiting = []
    for seed in range(400):
        users, ages = exact_inputs(seed % 7 + 1, seed)
        inputs = inputs_of(over_http, {"user": users, "age": ages})
        waiting.append((expected(2, users, ages), triton.async_infer("exact", inputs)))
    for labels, answer in waiting:
        assert answer.get_result().as_numpy("label").tolist() == labels.tolist()


def test_a_row_that_cannot_be_computed_fails_alone(server: Server) -> None:
    """Its code is behind the table's last row, which onnxruntime says of the merged run."""
    triton = over_http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=32)
    waiting = []
    for seed in range(100):
        users, ages = exact_inputs(3, seed)
        if seed % 10 == 0:
            users = np.array([1, 5_000_000, 2])
        inputs = inputs_of(over_http, {"user": users, "age": ages})
        waiting.append((seed, users, ages, triton.async_infer("exact", inputs)))
    for seed, users, ages, answer in waiting:
        if seed % 10 == 0:
            with pytest.raises(over_http.InferenceServerException, match="5000000"):
                answer.get_result()
        else:
            assert answer.get_result().as_numpy("label").tolist() == expected(2, users, ages).tolist()


def test_load_and_unload_by_requests(tmp_path: Path) -> None:
    """The server asks for a token with each request, and speaks TLS."""
    repository = tmp_path / "models"
    add_version(repository, "a", 1, exact_graph(1))
    add_version(repository, "b", 1, exact_graph(1))
    pem = self_signed(tmp_path)
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    arguments = ["--control", "explicit", "--model", "a", "--certificate", pem[0], "--key", pem[1]]
    with running(repository, tmp_path / "log", *arguments, "--token-file", str(token)) as server:
        context = ssl.create_default_context(cafile=pem[0])

        def ask(
            method: str, path: str, authorization: str | None = "Bearer s3cret", body: bytes = b""
        ) -> tuple[int, Any]:
            connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=30)
            connection.request(method, path, body, {} if authorization is None else {"Authorization": authorization})
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            return answer.status, json.loads(data) if data else None

        for wrong in (None, "Bearer s3cre", "s3cret", "Bearer s3cret2"):
            assert ask("GET", "/v2/models/a", wrong)[0] == 401
            assert ask("GET", "/metrics", wrong)[0] == 401
        assert ask("GET", "/v2/health/ready", None)[0] == 200
        assert ask("GET", "/v2/models/a/ready")[0] == 200
        assert ask("GET", "/v2/models/b/ready")[0] == 404
        with over_grpc.InferenceServerClient(
            f"localhost:{server.grpc_port}", ssl=True, root_certificates=pem[0]
        ) as triton:
            headers = {"authorization": "Bearer s3cret"}
            with pytest.raises(over_grpc.InferenceServerException, match="asks for a token"):
                triton.load_model("b")
            triton.load_model("b", headers=headers)
            users, ages = exact_inputs(3, 3)
            answer = triton.infer("b", inputs_of(over_grpc, {"user": users, "age": ages}), headers=headers)
            assert answer.as_numpy("label").tolist() == expected(1, users, ages).tolist()
            triton.unload_model("b", headers=headers)
            assert not triton.is_model_ready("b", headers=headers)
        assert ask("POST", "/v2/repository/models/c/load")[0] == 404
        (repository / "b" / "2").mkdir()
        (repository / "b" / "2" / "model.onnx").write_bytes(b"torn")
        status, reply = ask("POST", "/v2/repository/models/b/load")
        assert (status, "version 2 of model 'b' cannot be loaded" in reply["error"]) == (400, True)
        # Its version before answers.
        body = json.dumps({"inputs": tensors(users, ages)}).encode()
        status, reply = ask("POST", "/v2/models/b/infer", body=body)
        assert (status, reply["model_version"]) == (200, "1")


def test_what_a_user_can_mend_ends_with_2(tmp_path: Path, server: Server) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "models").mkdir()
    models = str(tmp_path / "models")
    for arguments, message in (
        (["serve", str(tmp_path / "none")], "is no folder"),
        (["serve", models, "--token-file", str(tmp_path / "empty")], "has no token"),
        (["serve", models, "--token-file", str(tmp_path / "none")], "cannot be read"),
        (["serve", models, "--key", "key.pem"], "needs both"),
        (["serve", models, "--model", "a"], "--control explicit"),
        (["serve", models, "--certificate", "c.pem", "--key", "k.pem", "--port", "0"], "TLS"),
        (["serve", models, "--port", str(server.port)], "is taken|in use|cannot be taken"),
        (["repository", "rollback", models], "no earlier release"),
        (["repository", "push", models, "a=nowhere"], "is no folder"),
        (["repository", "push", models, f"a={models}"], "has no model.onnx"),
    ):
        outcome = subprocess_free_invoke(arguments)
        assert outcome[0] == 2, (arguments, outcome)
        assert any(part in outcome[1] for part in message.split("|")), (arguments, outcome)
    assert "TOKEN" not in " ".join(os.environ)


def subprocess_free_invoke(arguments: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, " ".join(result.output.split())


def test_raw_bytes_of_every_type_come_back() -> None:
    """Codec of tensors, by NumPy."""
    from headrace.export.serve.options import RequestError
    from headrace.export.serve.tensors import DATATYPES, from_raw, from_values, to_raw

    rng = np.random.default_rng(0)
    for datatype, dtype in DATATYPES.items():
        if datatype == "BYTES":
            array = np.array([["", "é"], ["a" * 300, "\0"]], object)
        else:
            array = rng.integers(0, 2, (2, 2)).astype(dtype)
        decoded = from_raw("x", datatype, (2, 2), to_raw(array))
        assert decoded.dtype == dtype
        assert (decoded == array).all()
        assert (from_values("x", datatype, (2, 2), array.tolist()) == array).all()
    for datatype, dtype in DATATYPES.items():
        if dtype.kind in "iu":
            ends = [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]
            for nested in (ends, [[n] for n in ends]):
                decoded = from_values("x", datatype, (2, 1), nested)
                assert decoded.dtype == dtype
                assert decoded.ravel().tolist() == ends
            for wrong in (ends[0] - 1, ends[1] + 1):
                with pytest.raises(RequestError, match=f"do not fit into {datatype}") as refused:
                    from_values("x", datatype, (2,), [1, wrong])
                assert refused.value.status == 400
            for bad_value in (True, 1.0, "1", None):
                with pytest.raises(RequestError, match=f"must be of the type {datatype}"):
                    from_values("x", datatype, (2,), [1, bad_value])
    assert raw_request(*exact_inputs(1, 1))[0][-4:] == exact_inputs(1, 1)[1].tobytes()
