"""scripts/compare_server.py against `headrace serve` with an export of trees and of the features before them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.export.record import read_record
from headrace.storage import local

support = pytest.importorskip("tests.export_support", reason="ONNX is not installed: run `make onnx`")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("geventhttpclient", reason="tritonclient's HTTP is not installed: run `make serve`")
serve_support = pytest.importorskip("tests.serve_support")
ROOT = Path(__file__).parents[2]


def compare(saved: Path, port: int) -> Any:
    words = [str(saved), f"127.0.0.1:{port}", "--model", "clicks", "--requests", "4", "--rows", "30"]
    command = [sys.executable, str(ROOT / "scripts" / "compare_server.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_server_is_compared_with_the_saved_model(tmp_path: Path) -> None:
    from headrace.export.features.graph_file import add_features
    from headrace.export.serve.repository import push
    from headrace.export.tree_graph import write_xgboost

    saved = {seed: support.saved_trees(tmp_path / str(seed), seed) for seed in (1, 2)}
    exported = local(tmp_path / "exported")
    exported.make_dir()
    write_xgboost(local(saved[1]), exported)
    assert add_features(exported, support.fitted()) == []
    record = read_record(exported)
    assert sorted(record.graphs) == ["features", "model"]
    assert [t.name for t in record.graphs["features"].outputs] == [
        f"{f.name}.feature" for f in support.fitted().features
    ]
    push(local(tmp_path / "models"), {"clicks": exported}, 2)
    with serve_support.running(tmp_path / "models", tmp_path / "log") as server:
        same, different = (compare(saved[seed], server.port) for seed in (1, 2))
    assert same.returncode == 0, same.stdout + same.stderr
    assert "clicks label: 4 requests of 30 rows, largest difference" in same.stdout
    assert float(same.stdout.split()[-1]) < 1e-5
    assert different.returncode == 1, different.stdout + different.stderr
    assert float(different.stdout.split()[-1]) > np.float32(1e-3)
