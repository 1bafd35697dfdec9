"""A tracking server of MLflow as the registry, and its models in programs that know MLflow alone."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pandas as pd
import pytest
import requests
import yaml
from mlflow.tracking import MlflowClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import TypeAdapter, ValidationError

import headrace as hr
from headrace.comm.base import LocalCollective
from headrace.compute import native
from headrace.config import Model
from headrace.config.section import ServerText
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.jobs.pack import _reach, installed
from headrace.models import registry
from headrace.models.registry.artifact import FOLDER, log_model
from headrace.models.registry.promotion import promote
from headrace.models.registry.versions import aliases, numbered, versions
from headrace.models.saved import Changes, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.score.top_k import RETRIEVAL
from headrace.storage import Location, local
from tests.tracking_server import tracking_server


def rows() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "user": [f"u{i}" for i in rng.integers(0, 20, 300)],
            "price": rng.uniform(0.1, 9, 300),
            "click": rng.integers(0, 2, 300).astype("f4"),
        }
    )


def save_models(store: Path) -> tuple[Location, Location]:
    """One of a day, and one of the next day whose rows lie upon it."""
    fitted = hr.Workflow(
        (["user"] >> hr.Categorify()) + (["price"] >> hr.FillMissing() >> hr.Log()), label="click"
    ).fit(rows())
    workflow = local(store / "workflow")
    fitted.save(workflow.local_path())
    schema = FittedWorkflow.load(workflow).schema
    model = ShardedModel(schema, Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,)), LocalCollective(), 1)
    first, second = (local(store) / "models" / "clicks" / day / key / "model" for day, key in (("1", "a"), ("2", "b")))
    metadata = {"workflow": workflow, "pipeline": "clicks", "metrics": {}}
    save_model(first, model, ds="2026-01-01", key="a", **metadata)
    for weight in model.embeddings.weights:
        weight.data[1:4] += 0.5
    save_model(second, model, ds="2026-01-02", key="b", changes=Changes(first, 1.0), **metadata)
    return first, second


def environment(folder: Path, requirements: Sequence[str]) -> None:
    """Fill a folder with what a fresh environment has after `pip install` of some requirements: with links to the
    packages of this one."""
    folder.mkdir()
    distributions = installed()
    pinned = {r.name: r for r in map(Requirement, requirements)}
    assert "headrace" not in pinned
    for name, requirement in pinned.items():
        assert requirement.specifier.contains(distributions[canonicalize_name(name)].version), requirement
    for name in _reach(distributions, {(canonicalize_name(n), frozenset(r.extras)) for n, r in pinned.items()}, ()):
        distribution = distributions[name]
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    assert not [entry for entry in folder.iterdir() if "headrace" in entry.name]


def test_a_champion_on_a_server_is_loaded_where_its_requirements_alone_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    first, second = save_models(store)
    expected = hr.Predictor(second.local_path()).predict(rows())
    assert not np.array_equal(expected, hr.Predictor(first.local_path()).predict(rows()))
    with tracking_server(tmp_path) as url:
        ws = Workspace.from_environment(tmp_path / "home", {"HEADRACE_REGISTRY": url, "HEADRACE_STORE": str(store)})
        assert ws.registry_uri == url
        assert (registry.champion(ws, "clicks"), versions(ws, "clicks"), aliases(ws, "clicks")) == (None, [], {})
        for key, model in (("a", first), ("b", second), ("b", second)):
            number = registry.register(ws, "clicks", model, {"auc": 0.7}, key, ds=model.path.parts[-3])
        assert number == "2"
        promote(ws, "clicks", "2", reason="because")
        champion = registry.champion(ws, "clicks")
        assert champion == numbered(ws, "clicks", "2")
        assert (champion.source, champion.key, champion.metrics) == (second, "b", {"auc": 0.7})  # type: ignore[union-attr]
        assert not (tmp_path / "home" / "mlflow.db").exists()
        assert list((ws.scratch / "registry").files()) == []

        shutil.rmtree(store)  # the server has all that is needed
        client = MlflowClient(url)
        run = client.get_model_version_by_alias("clicks", "champion").run_id
        logged = Path(client.download_artifacts(run, FOLDER, str(tmp_path)))
        requirements = (logged / "requirements.txt").read_text().splitlines()
        environment(tmp_path / "site", requirements)
        completed = subprocess.run(
            # -S: nothing of this environment besides, nor the checkout, which is installed in place there.
            [sys.executable, "-S", "-P", Path(__file__).with_name("pyfunc_side.py"), "models:/clicks@champion"],
            input=rows().drop(columns="click").to_json(orient="split", double_precision=15),
            env={
                **os.environ,
                "PYTHONPATH": str(tmp_path / "site"),
                "MLFLOW_TRACKING_URI": url,
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert completed.returncode == 0, completed.stderr[-4000:]
    report = json.loads(completed.stdout.splitlines()[-1])
    assert report["headrace"].endswith("/code/headrace.zip/headrace/__init__.py")
    assert not report["before"]
    assert (report["native"], report["level"]) == (native.library() is not None, RETRIEVAL.path().parent.name)
    assert report["dtype"] == "float32"
    np.testing.assert_array_equal(np.array(report["scores"], "f4"), expected)

    # What MLflow's own managers of environments read.
    described = yaml.safe_load((logged / "MLmodel").read_text())["flavors"]["python_function"]["env"]
    virtual, conda = (yaml.safe_load((logged / described[kind]).read_text()) for kind in ("virtualenv", "conda"))
    assert virtual == {"python": platform.python_version(), "dependencies": ["-r requirements.txt"]}
    assert conda["dependencies"][-1] == {"pip": requirements}

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=rf"the model registry {url} does not answer ") as away:
        registry.champion(ws, "clicks")
    assert away.value.exit_code == 75


@pytest.mark.parametrize(("code", "exit_code"), [(503, 75), (429, 75), (403, 2)])
def test_a_server_that_says_to_come_later_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(code)

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UserError, match=f"the model registry {url} ") as raised:
            registry.champion(Workspace(tmp_path, registry_server=url), "clicks")
        server.shutdown()
        thread.join()
    assert raised.value.exit_code == exit_code


@pytest.mark.parametrize(
    "fault",
    [
        requests.HTTPError("507 Server Error at https://me:abc@store/x\nmore"),
        PermissionError(13, "no"),
        RuntimeError("no"),
    ],
)
def test_an_upload_that_fails_is_named(fault: Exception, tmp_path: Path) -> None:
    class Client:
        """A server's whose store of artifacts does not answer."""

        def log_artifacts(self, run_id: str, folder: str, path: str) -> None:
            assert (Path(folder) / "MLmodel").is_file()
            raise fault

    model, _ = save_models(tmp_path / "store")
    ws = Workspace(tmp_path / "home", registry_server="http://registry:5000")
    with pytest.raises(
        UserError, match=r"registry http://registry:5000: artifacts cannot be uploaded: .*(507|no)"
    ) as e:
        log_model(ws, Client(), "run", "clicks", "a", model)  # type: ignore[arg-type]
    assert "abc" not in str(e.value)
    assert not list(ws.scratch.files())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("sqlite:///mlflow.db", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
        ("http://me:secret@host:5000", "credentials are no part of an address"),
    ],
)
def test_addresses_of_servers(address: str, message: str) -> None:
    adapter = TypeAdapter(ServerText)
    assert adapter.validate_python("https://mlflow.example:5000/") == "https://mlflow.example:5000"
    with pytest.raises(ValidationError, match=message):
        adapter.validate_python(address)
