"""A graph in onnxruntime: what it is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("onnx", reason="ONNX is not installed: run `make onnx`")
from headrace.export.serve.model import OnnxGraph
from tests.serve_support import exact_graph, exact_inputs, expected


def test_tensors_at_odd_places_of_a_request_are_given_at_even_ones(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(exact_graph(1).SerializeToString())
    graph = OnnxGraph("exact", 1, file, 1)
    arrays: list[np.ndarray] = []
    session = graph._session

    def run(names: list[str], feeds: dict[str, Any]) -> Any:
        arrays.extend(feeds.values())
        return session.run(names, feeds)

    graph._session = SimpleNamespace(run=run)
    users, ages = exact_inputs(50, 1)
    body = b"odd" + users.tobytes() + b"." + ages.tobytes()
    blocks = [np.ndarray((1, 50), np.int64, body, 3), np.ndarray((1, 50, 1), np.float32, body, 4 + users.nbytes)]
    even = np.ascontiguousarray(ages)[np.newaxis]
    assert not blocks[0].flags.aligned
    (answer,) = graph.run_blocks(blocks)
    assert answer.tolist() == expected(1, users, ages).tolist()
    assert all(x.flags.aligned for x in arrays)
    # What lies right is not copied.
    graph.run_blocks([blocks[0], even])
    assert np.shares_memory(arrays[-1], even)
