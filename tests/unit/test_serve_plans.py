"""Plans kept of requests' headers: never those of another request."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
pytest.importorskip("httptools", reason="httptools is not installed: run `make serve`")
from headrace.export.serve.infer_json import Plans, RequestPlan
from headrace.export.serve.model import Model
from headrace.export.serve.options import RequestError, RequestLimits
from headrace.export.serve.server import _infer_answer
from headrace.export.serve.tensors import TensorSpec

INPUTS = [TensorSpec(name, "INT64", (-1,)) for name in "abc"]
INPUTS += [TensorSpec("s", "BYTES", (-1,)), TensorSpec("x", "FP32", (-1, 1)), TensorSpec("y", "FP32", (-1, 1))]
#: Whose outputs may be asked for raw or as JSON.
OUTPUTS = [TensorSpec("n", "INT64", (-1,)), TensorSpec("t", "BYTES", (-1,))]


def model(inputs: str = "abcxy") -> Model:
    return Model("m", 1, [x for x in INPUTS if x.name in inputs], OUTPUTS, True)


def request(tensors: dict[str, np.ndarray], **more: Any) -> tuple[bytes, bytes]:
    """The JSON and the raw tensors, in the order given."""
    types, raws, described = {"i": "INT64", "f": "FP32", "O": "BYTES"}, [], []
    for name, array in tensors.items():
        raws.append(array.tobytes() if array.dtype.kind != "O" else b"".join(b"\x01\0\0\0" + x for x in array))
        parameters = {"binary_data_size": len(raws[-1])}
        described.append(
            {"name": name, "datatype": types[array.dtype.kind], "shape": array.shape, "parameters": parameters}
        )
    return json.dumps({"inputs": described, **more}).encode(), b"".join(raws)


def arrays(rows: int, names: str = "abcxy") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        tensors[name] = rng.integers(0, 99, rows) if name in "abc" else rng.normal(size=(rows, 1)).astype(np.float32)
    return tensors


@pytest.mark.parametrize(
    ("order", "blocks"), [("abcxy", [3, 2]), ("cbaxy", [1, 1, 1, 2]), ("xyabc", [3, 2]), ("axbyc", [1] * 5)]
)
def test_blocks_are_the_inputs_in_the_models_order(order: str, blocks: list[int]) -> None:
    tensors = arrays(4, order)
    header, raw = request(tensors)
    plan = Plans().find(model(), header, RequestLimits())
    plan_blocks = plan.blocks(b"..." + raw, 3)
    assert [len(x) for x in plan_blocks] == blocks
    assert plan.key == tuple(x.shape[:1] + x.shape[2:] for x in plan_blocks)
    for name, x in zip("abcxy", (x for block in plan_blocks for x in block), strict=True):
        assert np.array_equal(x, tensors[name])
    with pytest.raises(RequestError, match="the inputs say"):
        plan.blocks(raw + b"0", 0)


def test_a_string_among_raw_inputs_is_no_block() -> None:
    tensors = {**arrays(2), "s": np.array([b"p", b"q"], object)}
    header, raw = request(tensors)
    plan = Plans().find(model("abcsxy"), header, RequestLimits())
    plan_blocks = plan.blocks(raw, 0)
    assert [x.shape for x in plan_blocks] == [(1, 2)] * 4 + [(1, 2, 1)] * 2
    assert plan_blocks[3].tolist() == [["p", "q"]]
    assert plan.key == ((1,),) * 4 + ((1, 1),) * 2


def test_a_header_that_comes_again_is_not_read_again() -> None:
    plans = Plans()
    headers = [request(arrays(rows))[0] for rows in (4, 5, 7)]
    assert len({len(h) for h in headers}) == 1
    first = [plans.find(model(), h, RequestLimits()) for h in headers]
    assert [p.rows for p in first] == [4, 5, 7]
    for i in (0, 2, 1, 1, 0):
        assert plans.find(model(), bytes(bytearray(headers[i])), RequestLimits()) is first[i]


def test_what_does_not_come_again_is_not_kept() -> None:
    """A plan that does not come again displaces none that does."""
    plans = Plans()
    header = request(arrays(4))[0]
    first_plan = plans.find(model(), header, RequestLimits())
    for number in range(2000):
        assert plans.find(model(), request(arrays(4), id=f"{number:04}")[0], RequestLimits()).id == f"{number:04}"
    assert plans.find(model(), header, RequestLimits()) is first_plan
    for number in range(2000):
        plans.find(model(), header + b" " * number, RequestLimits())
    assert plans.find(model(), header, RequestLimits()) is not first_plan
    assert len(plans._by_header) <= 512
    assert len(plans._last) <= 512


def body_of(answer: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    headers = dict(line.split(b": ") for line in head.split(b"\r\n")[1:])
    assert int(headers[b"content-length"]) == len(body)
    split = int(headers.get(b"inference-header-content-length", len(body)))
    return json.loads(body[:split]), body[split:]


@pytest.mark.parametrize("names", [["n"], ["t"], ["n", "t"]])
@pytest.mark.parametrize("raw", [True, False])
def test_answers_of_all_lengths(names: list[str], raw: bool) -> None:
    """One request's outputs may have other lengths the next time: of strings, or of rows where a model gives others."""
    options = {"outputs": [{"name": n, "parameters": {"binary_data": raw}} for n in names]}
    plan: RequestPlan = Plans().find(model(), request(arrays(4), **options)[0], RequestLimits())
    for rows, text in ((4, "a"), (4, "bcd"), (5, "e"), (4, "f")):
        outputs = [np.arange(rows), np.array([text] * rows, object)]
        header, raws = body_of(_infer_answer(model(), plan, outputs))
        assert [x["shape"] for x in header["outputs"]] == [[rows]] * len(names)
        assert [x["name"] for x in header["outputs"]] == names
        strings = (len(text).to_bytes(4, "little") + text.encode()) * rows
        expected = {"n": outputs[0].tobytes(), "t": strings}
        assert raws == b"".join(expected[n] for n in names if raw)
        if not raw:
            assert [x["data"] for x in header["outputs"]] == [outputs["nt".index(n)].tolist() for n in names]
