"""Versions of models while requests are answered: pushes, deltas, releases, rollbacks."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import UserError
from headrace.export.serve.repository import (
    apply_delta,
    push,
    push_deltas,
    read_releases,
    roll_back,
    write_delta,
    write_release,
)
from headrace.storage import local

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
onnx = pytest.importorskip("onnx", reason="ONNX is not installed: run `make onnx`")
pytest.importorskip("grpc", reason="grpcio is not installed: run `make serve`")
from tests.serve_support import STEP, Server, exact_graph, exact_inputs, expected, raw_request, running, tensors  # noqa: E402


def export(folder: Path, version: int, table: np.ndarray | None = None) -> Path:
    """A graph, with a second one and a table beside it, as `headrace export` writes them."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(exact_graph(version).SerializeToString())
    (folder / "query.onnx").write_bytes(exact_graph(version + 100).SerializeToString())
    (folder / "table-0-0.bin").write_bytes((np.arange(40_000, dtype=np.float32) if table is None else table).tobytes())
    graphs = {"model": {"file": "model.onnx"}, "query": {"file": "query.onnx"}}
    files = {f.name: f.stat().st_size for f in folder.iterdir()}
    (folder / "export.json").write_text(json.dumps({"format": "onnx", "graphs": graphs, "files": files}))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("versions")
    first = local(export(folder / "export-1", 1))
    push(local(folder / "models"), {"a": first, "b": first})
    with running(folder / "models", folder / "log", "--poll-seconds", "0.05") as running_server:
        yield running_server


def ask(server: Server, model: str) -> tuple[int, int]:
    """The version that an answer names, and the one that its numbers are of."""
    users, ages = exact_inputs(6, 1)
    status, answer = server.infer(model, {"inputs": tensors(users, ages)})
    assert status == 200, answer
    (label,) = [np.array(x["data"]) for x in answer["outputs"]]
    (label_version,) = {int(x) for x in (label - expected(0, users, ages)) / STEP}
    return int(answer["model_version"]), label_version


def test_thousands_of_requests_over_switches_each_of_one_version(server: Server, tmp_path: Path) -> None:
    stop = threading.Event()
    answered: list[int] = []
    rows = [1, 3, 64, 200]
    batches = [exact_inputs(n, n) for n in rows]
    requests = [raw_request(*b) for b in batches]
    bases = [expected(0, *b) for b in batches]

    def load(worker: int) -> list[int]:
        """The versions seen, in order; fails where an answer is none, or mixed."""
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        seen: list[int] = []
        number = worker
        while not stop.is_set():
            number += 1
            i = number % len(rows)
            body, headers = requests[i]
            connection.request("POST", "/v2/models/a/infer", body, headers)
            answer = connection.getresponse()
            data, split = answer.read(), int(answer.headers.get("Inference-Header-Content-Length", 0))
            assert answer.status == 200, data
            version = int(json.loads(data[:split])["model_version"])
            label = np.frombuffer(data, np.float32, offset=split)
            assert (label == bases[i] + np.float32(version * STEP)).all()
            seen.append(version)
            answered.append(version)
        connection.close()
        return seen

    with ThreadPoolExecutor(6) as pool:
        loads = [pool.submit(load, n) for n in range(6)]
        try:
            start = max(read_releases(local(server.repository)).current.values())
            for version in range(start + 1, start + 7):
                folder = local(export(tmp_path / str(version), version))
                assert push(local(server.repository), {"a": folder, "b": folder}) == version
                server.wait_for_version("a", version)
                until = len(answered) + 400
                while len(answered) < until and not any(f.done() for f in loads):
                    time.sleep(0.01)
        finally:
            stop.set()
        seen = [f.result() for f in loads]
    for versions in seen:
        assert versions == sorted(versions), "an older version answered after a newer one"
    assert {v for versions in seen for v in versions} >= set(range(start + 1, start + 7))


def test_all_graphs_and_models_of_a_release_flip_and_roll_back_together(server: Server, tmp_path: Path) -> None:
    served_version = read_releases(local(server.repository)).current["a"]
    folder = local(export(tmp_path / "new", served_version + 1))
    version = push(local(server.repository), {"a": folder, "b": folder})
    server.wait_for_version("a", version)
    assert ask(server, "a") == ask(server, "b") == (version, version)
    assert ask(server, "a.query") == (version, version + 100)
    roll_back(local(server.repository))
    server.wait_for_version("a", served_version)
    assert ask(server, "a") == ask(server, "b") == (served_version, served_version)
    assert ask(server, "a.query") == (served_version, served_version + 100)
    # One of the two is torn: neither flips.
    version = push(local(server.repository), {"b": folder, "a": folder})
    server.wait_for_version("a", version)
    torn = server.repository / "b" / str(version + 1)
    torn.mkdir()
    (torn / "model.onnx").write_bytes(exact_graph(1).SerializeToString()[:-100])
    good = local(export(server.repository / "a" / str(version + 1), version + 1))
    release = local(server.repository / "release.json")
    release_text = release.read_text()
    release.put_text(json.dumps({"models": {"a": version + 1, "b": version + 1}}))
    assert "onnxruntime" in server.wait_for_failure("b", version + 1)
    assert good.is_dir()
    assert ask(server, "a")[0] == ask(server, "b")[0] == version
    assert server.get("/v2/health/ready")[0] == 200
    release.put_text("{")
    time.sleep(0.3)
    assert ask(server, "a")[0] == version
    release.put_text(release_text)


def test_a_delta_is_taken_without_a_restart(server: Server, tmp_path: Path) -> None:
    released = read_releases(local(server.repository)).current
    base = server.repository / "a" / str(released["a"])
    table = np.arange(40_000, dtype=np.float32)
    table[[5, 777, 39_999]] = -1
    version = max(int(v.name) for v in (server.repository / "a").iterdir() if v.name.isdecimal()) + 1
    new = export(tmp_path / "new", version, np.concatenate([table, [1, 2, 3]]).astype(np.float32))
    size = write_delta(local(base), local(new), local(tmp_path / "delta"))
    assert size < 20_000 < sum(f.stat().st_size for f in new.iterdir())
    assert push_deltas(local(server.repository), {"a": local(tmp_path / "delta")}) == version
    server.wait_for_version("a", version)
    assert ask(server, "a") == (version, version)
    version_folder = server.repository / "a" / str(version)
    assert {f.name: f.read_bytes() for f in version_folder.iterdir()} == {f.name: f.read_bytes() for f in new.iterdir()}
    with pytest.raises(UserError, match="another base"):
        push_deltas(local(server.repository), {"a": local(tmp_path / "delta")})
    assert read_releases(local(server.repository)).current == {**released, "a": version}


def test_files_that_are_the_same_are_shared(tmp_path: Path) -> None:
    repository = local(tmp_path / "models")
    push(repository, {"a": local(export(tmp_path / "1", 1))})
    push(repository, {"a": local(export(tmp_path / "2", 2))})
    files = [tmp_path / "models" / "a" / v / "table-0-0.bin" for v in ("1", "2")]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    assert read_releases(repository).earlier == ({"a": 1},)


def test_the_first_push_leaves_other_models_served(tmp_path: Path) -> None:
    """Other models were served by their newest versions; a model without a graph of ours is not released."""
    repository = local(tmp_path / "models")
    for folder in ("old/2", "old/10", "mine/3"):
        export(tmp_path / "models" / folder, 1)
    (repository / "old" / "11").make_dir()
    (repository / "python" / "1" / "model.py").put_text("")
    (repository / ".staged" / "1" / "model.onnx").put_text("")
    (repository / "python" / "config.pbtxt").put_text("")
    assert push(repository, {"mine": local(export(tmp_path / "new", 2))}) == 4
    assert read_releases(repository).current == {"mine": 4, "old": 10}
    # What a release leaves out is not taken up again.
    write_release(repository, {"mine": 4})
    push(repository, {"mine": local(tmp_path / "new")})
    assert read_releases(repository).current == {"mine": 5}


def test_one_process_at_a_time_changes_a_repository(tmp_path: Path) -> None:
    repository, folder = local(tmp_path / "models"), export(tmp_path / "1", 1)
    for _ in range(2):
        push(repository, {"a": local(folder)})
    commands = (["push", str(repository), f"a={folder}"], ["rollback", str(repository)])
    with (repository / ".push").lease():
        for command in commands:
            result = CliRunner().invoke(app, ["repository", *command])
            assert result.exit_code == 69, result.output
            assert "another process changes" in " ".join(result.output.split())
    assert read_releases(repository).current == {"a": 2}
    assert CliRunner().invoke(app, ["repository", *commands[1]]).exit_code == 0
    assert read_releases(repository).current == {"a": 1}


@settings(max_examples=60)
@given(
    base=st.dictionaries(st.sampled_from("abc"), st.binary(max_size=400), min_size=1),
    new=st.dictionaries(st.sampled_from("abc"), st.binary(max_size=400), min_size=1),
    edits=st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=3)), max_size=5),
    grown=st.integers(-100, 100),
)
def test_a_delta_makes_the_new_version(
    tmp_path_factory: pytest.TempPathFactory,
    base: dict[str, bytes],
    new: dict[str, bytes],
    edits: list[tuple[int, bytes]],
    grown: int,
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    table = bytearray(np.arange(1200, dtype=np.float32).tobytes())
    base = {**base, "table": bytes(table)}
    for place, data in edits:
        table[place : place + len(data)] = data
    changed = bytes(table) + b"\0" * grown if grown >= 0 else bytes(table)[:grown]
    for name, files in (("base", base), ("new", {**new, "table": changed})):
        for file, data in files.items():
            (folder / name).mkdir(exist_ok=True)
            (folder / name / file).write_bytes(data)
    write_delta(local(folder / "base"), local(folder / "new"), local(folder / "delta"))
    with local(folder / "made").new_folder() as target:
        apply_delta(local(folder / "base"), local(folder / "delta"), target)
    assert {f.name: f.read_bytes() for f in (folder / "made").iterdir()} == {**new, "table": changed}
    assert {f.name: f.read_bytes() for f in (folder / "base").iterdir()} == base


@pytest.mark.parametrize("index", [b"1234567", b"\xff" * 8, (10**9).to_bytes(8, "little")])
def test_an_index_of_other_blocks_is_refused(index: bytes, tmp_path: Path) -> None:
    for name, last in (("base", 0), ("new", 1)):
        local(tmp_path / name / "table").put_bytes(bytes(1000) + bytes([last]))
    write_delta(local(tmp_path / "base"), local(tmp_path / "new"), local(tmp_path / "delta"))
    (file,) = (tmp_path / "delta").glob("blocks-*.index.bin")
    assert file.read_bytes() == (1000 // 64).to_bytes(8, "little")
    file.write_bytes(index)
    with pytest.raises(UserError, match="torn"), local(tmp_path / "made").new_folder() as target:
        apply_delta(local(tmp_path / "base"), local(tmp_path / "delta"), target)


def test_a_torn_delta_is_refused(tmp_path: Path) -> None:
    for name, version in (("base", 1), ("new", 2)):
        export(tmp_path / name, version)
    write_delta(local(tmp_path / "base"), local(tmp_path / "new"), local(tmp_path / "delta"))
    broken = next(f for f in (tmp_path / "delta").iterdir() if f.name.startswith(("whole", "blocks")))
    data = broken.read_bytes()
    broken.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match="torn"), local(tmp_path / "made").new_folder() as target:
        apply_delta(local(tmp_path / "base"), local(tmp_path / "delta"), target)
    broken.unlink()
    with pytest.raises(UserError, match="torn"), local(tmp_path / "made").new_folder() as target:
        apply_delta(local(tmp_path / "base"), local(tmp_path / "delta"), target)
    assert not (tmp_path / "made").exists()
