"""A row operator that is added by the documented places alone (docs/architecture.md) is used everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import headrace as hr
from headrace.cli.reference import pages
from headrace.config import Chain
from headrace.features.ops import OPERATORS
from headrace.storage import local
from headrace.testing import check_operator

MODULE = '''
"""A family of operators."""

from typing import ClassVar

import pyarrow.compute as pc

from headrace.features.functions.arrays import doubles
from headrace.features.ops.base import Elementwise, number


class Quarter(Elementwise):
    """A quarter of a number."""

    name: ClassVar[str] = "quarter"
    onnx: ClassVar[str] = "added_family:quarter_onnx"

    def type_of(self, input_type):
        return number(input_type, "double")

    def spark_value(self, x, input_type, state):
        return x.cast("double") / 4.0

    def arrow_value(self, x, input_type, state):
        return pc.divide(doubles(x), 4.0)


class QuarterByPython(Quarter):
    """The same without an ONNX body of its own."""

    name: ClassVar[str] = "quarter_by_python"


def __getattr__(name):
    if name != "quarter_onnx":
        raise AttributeError(name)
    from headrace.export.features.graph import doubles as onnx_doubles
    from headrace.export.features.graph import real
    from headrace.export.features.operators import each_column, float64

    @each_column()
    def quarter_onnx(step, name, x):
        return real(x, step.graph.add("Div", onnx_doubles(step.graph, x), float64(step, 4.0)))

    return quarter_onnx
'''
ROWS = pa.table({"price": [1.0, None, -7.5, 1e30], "click": pa.array([0, 1, 0, 1], pa.int32())})


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a class in a module, and its line in the registry."""
    (tmp_path / "added_family.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, cls in (("quarter", "Quarter"), ("quarter_by_python", "QuarterByPython")):
        monkeypatch.setitem(OPERATORS.builtin, name, f"added_family:{cls}")  # type: ignore[misc]


@pytest.mark.usefixtures("added")
def test_an_added_operator_is_used_everywhere(spark: SparkSession, tmp_path: Path) -> None:
    chain = Chain.model_validate({"columns": ["price"], "ops": ["quarter"]})
    expected = np.array([0.25, 0.0, -1.875, 2.5e29], np.float32)
    fitted = hr.Workflow([chain], label="click").fit(ROWS)
    np.testing.assert_array_equal(fitted.transform(ROWS)["price"].to_numpy(), expected)
    # Both engines, row by row, and after saving and loading.
    assert check_operator(["price"] >> hr.Quarter(), ROWS, label="click", spark=spark) is not None
    assert "### `quarter`\n\nA quarter of a number." in "".join(pages().values())
    assert "Quarter" in dir(hr)

    graph_file = pytest.importorskip("headrace.export.features.graph_file", reason="ONNX is not installed: `make onnx`")
    runtime = pytest.importorskip("onnxruntime")
    from headrace.export.features.columns import FeaturesStep, raw_columns, to_tensors

    workflow = fitted.fitted
    graph_file.write_features(workflow, local(tmp_path / "graph"))
    session = runtime.InferenceSession(tmp_path / "graph" / "features.onnx")
    tensors = to_tensors(raw_columns(workflow.workflow, ["price"]), ROWS.select(["price"]).to_batches()[0])
    (by_graph,) = session.run(None, tensors)
    np.testing.assert_array_equal(by_graph.reshape(-1), expected)

    # Without an ONNX body an export names the operator, and its Python step computes it.
    chain = Chain.model_validate({"columns": ["price"], "ops": ["quarter_by_python"]})
    workflow = hr.Workflow([chain], label="click").fit(ROWS).fitted
    assert graph_file.faults(workflow) == [
        f"features.workflow[0].ops[0] ({workflow.workflow.chains[0].steps[0].op.reference()}): no operator of ONNX "
        f"does that"
    ]
    by_python = FeaturesStep.from_workflow(workflow)(tensors)["price.feature"]
    np.testing.assert_array_equal(by_python.reshape(-1), expected)
