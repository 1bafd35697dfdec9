"""Inference requests and answers of HTTP: JSON, followed by raw tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.export.serve.model import Model
from headrace.export.serve.options import RequestError, RequestLimits
from headrace.export.serve.tensors import (
    DATATYPES,
    Array,
    ShapeKey,
    TensorSpec,
    blocks_of,
    elements,
    from_raw,
    from_values,
    key_of,
    to_raw,
)

#: Limits of the cache of parsed headers: their number, and bytes of each.
_PLANS, _PLAN_BYTES = 512, 8192


@dataclass(frozen=True, slots=True)
class _Raw:
    """Position of a raw input after the JSON."""

    spec: TensorSpec
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _View:
    """Position of a block of raw inputs after the JSON."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Parsed request.

    Attributes:
        rows: number of rows of each input.
        key: key by which requests are merged; see `tensors.key_of`.
        inputs: inputs in the model's order: arrays, or positions of raw ones.
        views: blocks of the inputs if all are raw numbers; else None.
        tail: bytes of raw tensors that must follow the JSON.
        outputs: index of each requested output, and whether it is raw, in the requested order.
        id: id to repeat in the answer.
        timeout: seconds that the request may wait.
        header: the JSON.
        answers: cached parts of answers before their raw tensors, by the outputs' shapes.
    """

    rows: int
    key: ShapeKey
    inputs: tuple[Array | _Raw, ...]
    views: tuple[_View, ...] | None
    tail: int
    outputs: tuple[tuple[int, bool], ...]
    id: str
    timeout: float
    header: bytes
    answers: dict[tuple[tuple[int, ...], ...], bytes] = field(default_factory=dict)

    def blocks(self, body: bytes | memoryview, offset: int) -> list[Array]:
        """Return the inputs in the model's order; raw ones begin at `offset`.

        Raises:
            RequestError: the body has more or fewer bytes than the JSON says.
        """
        if len(body) - offset != self.tail:
            raise RequestError(400, f"{len(body) - offset:,} bytes of raw tensors; the inputs say {self.tail:,}")
        if self.views is not None:
            return [np.ndarray(x.shape, x.dtype, body, offset + x.start) for x in self.views]
        return blocks_of(x if not isinstance(x, _Raw) else self._read(x, body, offset) for x in self.inputs)

    @staticmethod
    def _read(x: _Raw, body: bytes | memoryview, offset: int) -> Array:
        return from_raw(x.spec.name, x.spec.datatype, x.shape, body[offset + x.start : offset + x.stop])


class Plans:
    """Cache of parsed headers: a client's headers for batches of one size are equal, and are parsed once."""

    def __init__(self) -> None:
        self._by_header: dict[bytes, RequestPlan] = {}
        #: The last plan of each header length: comparing a header is cheaper than hashing its thousands of bytes.
        self._last: dict[int, RequestPlan] = {}

    def find(self, model: Model, header: bytes, limits: RequestLimits) -> RequestPlan:
        """Return the plan of a request's JSON for a model. Raises RequestError: the JSON is invalid."""
        plan = self._last.get(len(header))
        if plan is not None and plan.header == header:
            return plan
        plan = self._by_header.get(header)
        if plan is None:
            plan = _plan(model, header, limits)
            # A header with an id of its own does not repeat.
            if plan.views is None or plan.id or len(header) > _PLAN_BYTES:
                return plan
            if len(self._by_header) >= _PLANS:
                self._by_header.clear()
                self._last.clear()
            self._by_header[header] = plan
        self._last[len(header)] = plan
        return plan


def _plan(model: Model, header: bytes, limits: RequestLimits) -> RequestPlan:
    if len(header) > limits.json_bytes:
        advice = f"a request may have {limits.json_bytes:,} bytes: send raw tensors"
        raise RequestError(413, f"JSON of {len(header):,} bytes; {advice}")
    try:
        request = json.loads(header)
    except (ValueError, RecursionError) as e:
        raise RequestError(400, f"the request is no JSON: {e}"[:300]) from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise RequestError(400, 'the request must be an object with "inputs", a list')
    inputs, tail = _inputs(model, request["inputs"], limits)
    parameters = _parameters(request)
    outputs = _outputs(model, request.get("outputs"), parameters.get("binary_data_output") is True)
    name = request.get("id", "")
    if not isinstance(name, str) or len(name) > 1000:
        raise RequestError(400, '"id" must be a string of at most 1,000 characters')
    rows = rows_of(model, [x.shape for x in inputs], limits)
    timeout = timeout_of(parameters.get("timeout"), limits)
    views = _views(inputs)
    key = key_of(views) if views is not None else tuple((1, *x.shape[1:]) for x in inputs)
    return RequestPlan(rows, key, tuple(inputs), views, tail, outputs, name, timeout, header)


def _views(inputs: Sequence[Array | _Raw]) -> tuple[_View, ...] | None:
    """Return blocks of the inputs if all are raw numbers, else None."""
    blocks: list[list[_Raw]] = []
    for x in inputs:
        if not isinstance(x, _Raw) or x.dtype.kind == "O":
            return None
        previous = blocks[-1][-1] if blocks and x.shape else None
        if previous is not None and (previous.stop, previous.dtype, previous.shape) == (x.start, x.dtype, x.shape):
            blocks[-1].append(x)
        else:
            blocks.append([x])
    return tuple(_View((len(block), *block[0].shape), block[0].dtype, block[0].start) for block in blocks)


def timeout_of(parameter: Any, limits: RequestLimits) -> float:
    """Return the seconds that a request may wait, from its parameter in microseconds.

    Raises:
        RequestError: the parameter is not a valid number.
    """
    if parameter is None:
        return limits.timeout
    number = min(parameter, 10**18) if type(parameter) is int else parameter if isinstance(parameter, float) else 0
    if isinstance(parameter, str) and parameter.isascii() and parameter.isdigit():
        number = int(parameter[:18])
    if not number > 0 or not math.isfinite(number):
        raise RequestError(400, "the parameter 'timeout' must be a number of microseconds above 0")
    return min(limits.timeout, number / 1e6)


def _inputs(model: Model, tensors: list[Any], limits: RequestLimits) -> tuple[list[Array | _Raw], int]:
    inputs: dict[str, Array | _Raw] = {}
    start = 0
    for tensor in tensors:
        if not isinstance(tensor, dict):
            raise RequestError(400, "each input must be an object with name, datatype and shape")
        spec = input_of(model, tensor.get("name"), inputs)
        shape = spec.check(tensor.get("datatype"), tensor.get("shape"))
        size = _parameters(tensor).get("binary_data_size")
        if size is None:
            if "data" not in tensor:
                raise RequestError(400, f"input '{spec.name}' has neither data nor the parameter binary_data_size")
            inputs[spec.name] = from_values(spec.name, spec.datatype, shape, tensor["data"])
            continue
        if type(size) is not int or not 0 <= size <= limits.body_bytes:
            raise RequestError(400, f"input '{spec.name}': binary_data_size must be a number of bytes")
        dtype, count = DATATYPES[spec.datatype], elements(shape)
        if dtype.kind != "O" and size != count * dtype.itemsize:
            size_text = f"{spec.datatype} {list(shape)} has {count * dtype.itemsize:,} bytes"
            raise RequestError(400, f"input '{spec.name}': {size_text}; binary_data_size is {size:,}")
        inputs[spec.name] = _Raw(spec, dtype, shape, start, start + size)
        start += size
    check_complete(model, inputs)
    return [inputs[x.name] for x in model.inputs], start


def input_of(model: Model, name: Any, earlier: Mapping[str, Any]) -> TensorSpec:
    """Return an input by name. Raises RequestError if the model has no such input, or the request names it twice."""
    index = model.input_index.get(name) if isinstance(name, str) else None
    if index is None:
        names = ", ".join(x.name for x in model.inputs)
        raise RequestError(400, f"model '{model.name}' has no input {str(name)[:100]!r}; its inputs: {names}")
    if name in earlier:
        raise RequestError(400, f"input '{name}' is given twice")
    return model.inputs[index]


def check_complete(model: Model, inputs: Mapping[str, Any]) -> None:
    """Raise RequestError if inputs are missing; the message names them."""
    if missing := [x.name for x in model.inputs if x.name not in inputs]:
        raise RequestError(400, f"model '{model.name}' needs the inputs: {', '.join(missing)}")


def rows_of(model: Model, shapes: Sequence[tuple[int, ...]], limits: RequestLimits) -> int:
    """Return the number of rows of a request.

    Raises:
        RequestError: the inputs have different numbers of rows, none, or too many (413).
    """
    if not model.by_row:
        return 1
    counts = {shape[0] for shape in shapes}
    if len(counts) > 1:
        counts_text = ", ".join(f"{x.name} {shape[0]:,}" for x, shape in zip(model.inputs, shapes, strict=True))
        raise RequestError(400, f"the inputs have different numbers of rows: {counts_text}"[:1000])
    (rows,) = counts
    if rows == 0:
        raise RequestError(400, "the inputs have no rows")
    if rows > limits.rows:
        raise RequestError(413, f"{rows:,} rows; a request may have {limits.rows:,}: send it in parts")
    return rows


def _parameters(container: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = container.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(400, '"parameters" must be an object')
    return parameters


def _outputs(model: Model, requested: Any, raw: bool) -> tuple[tuple[int, bool], ...]:
    if requested is None or requested == []:
        return tuple((i, raw) for i in range(len(model.outputs)))
    if not isinstance(requested, list) or not all(isinstance(x, dict) for x in requested):
        raise RequestError(400, '"outputs" must be a list of objects with a name')
    outputs = []
    for output in requested:
        parameters = _parameters(output)
        if "classification" in parameters:
            raise RequestError(400, "the parameter 'classification' is not served: rank the outputs yourself")
        outputs.append((output_of(model, output.get("name")), parameters.get("binary_data", raw) is True))
    return tuple(outputs)


def output_of(model: Model, name: Any) -> int:
    """Return an output's index. Raises RequestError if the model has no such output."""
    index = model.output_index.get(name) if isinstance(name, str) else None
    if index is None:
        names = ", ".join(x.name for x in model.outputs)
        raise RequestError(400, f"model '{model.name}' has no output {str(name)[:100]!r}; its outputs: {names}")
    return index


def answer(model: Model, plan: RequestPlan, outputs: Sequence[Array]) -> tuple[bytes, list[bytes]]:
    """Return the JSON of an answer, and the raw tensors that follow it."""
    tensors: list[dict[str, Any]] = []
    raws: list[bytes] = []
    for index, raw in plan.outputs:
        spec, array = model.outputs[index], outputs[index]
        tensor: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape)}
        if raw:
            raws.append(to_raw(array))
            tensor["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RequestError(500, f"output '{spec.name}' is not finite, which JSON cannot say: ask for it raw")
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    header: dict[str, Any] = {"model_name": model.name, "model_version": str(model.version), "outputs": tensors}
    if plan.id:
        header["id"] = plan.id
    return json.dumps(header, separators=(",", ":")).encode(), raws
