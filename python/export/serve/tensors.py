"""Tensors of the protocol: names of types, raw bytes and JSON."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.export.serve.options import RequestError

Array = npt.NDArray[Any]

#: NumPy's types by KServe's names. BYTES are strings of any length; in raw bytes each follows its length (uint32).
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
#: Most elements of a tensor, far more than a request's body can hold.
_MOST_ELEMENTS = 1 << 40
#: KServe's names of types by onnxruntime's names.
ONNX_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


Blocks = Sequence[Array]
#: For each block, its number of inputs and their shape without rows.
ShapeKey = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model; -1 in its shape stands for any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def check(self, datatype: Any, shape: Any) -> tuple[int, ...]:
        """Return the shape of a request's tensor. Raises RequestError if type or shape do not fit."""
        if datatype != self.datatype:
            raise RequestError(400, f"input '{self.name}' has the type {datatype!r}; expected {self.datatype}")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            lengths_text = "" if not isinstance(shape, list) else f" of {len(shape):,} numbers from 0 on"
            raise RequestError(400, f"input '{self.name}': its shape must be a list of lengths{lengths_text}")
        if len(shape) != len(self.shape) or any(
            expected not in (-1, n) for expected, n in zip(self.shape, shape, strict=True)
        ):
            raise RequestError(
                400, f"input '{self.name}' has the shape {str(shape)[:200]}; expected {list(self.shape)}"
            )
        if elements(filter(None, shape)) > _MOST_ELEMENTS:
            raise RequestError(400, f"input '{self.name}': its shape has more than {_MOST_ELEMENTS:,} elements")
        return tuple(shape)

    def json(self) -> dict[str, Any]:
        """Return the tensor's metadata as JSON values."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


def elements(shape: Iterable[int]) -> int:
    """Return the number of elements of a tensor."""
    count = 1
    for n in shape:
        count *= n
    return count


def from_raw(name: str, datatype: str, shape: tuple[int, ...], data: bytes | memoryview) -> Array:
    """Return the tensor of raw bytes: a view of them, except for BYTES.

    Raises:
        RequestError: there are too many or too few bytes.
    """
    count = elements(shape)
    if datatype == "BYTES":
        return _strings(name, count, bytes(data)).reshape(shape)
    dtype = DATATYPES[datatype]
    if len(data) != count * dtype.itemsize:
        raise RequestError(
            400, f"input '{name}' has {len(data):,} bytes; {datatype} {list(shape)} has {count * dtype.itemsize:,}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _strings(name: str, count: int, data: bytes) -> Array:
    texts: list[str] = []
    offset = 0
    try:
        while offset < len(data):
            (length,) = struct.unpack_from("<I", data, offset)
            offset += 4
            if offset + length > len(data):
                raise RequestError(400, f"input '{name}': a string of {length:,} bytes is cut off")
            texts.append(data[offset : offset + length].decode())
            offset += length
    except struct.error:
        raise RequestError(400, f"input '{name}': the length of a string is cut off") from None
    except UnicodeDecodeError:
        raise RequestError(400, f"input '{name}': a string is not UTF-8") from None
    if len(texts) != count:
        raise RequestError(400, f"input '{name}' has {len(texts):,} strings; its shape says {count:,}")
    array = np.empty(count, object)
    array[:] = texts
    return array


def from_values(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> Array:
    """Return a tensor of numbers or strings in row order, nested or flat.

    Raises:
        RequestError: a value has another type, or their number does not fit the shape.
    """
    dtype = DATATYPES[datatype]
    if datatype == "BYTES":
        flat = _flat(values)
        if not all(isinstance(v, str) for v in flat):
            raise RequestError(400, f"input '{name}': its data must be strings")
        array = np.empty(len(flat), object)
        array[:] = flat
    else:
        array = _numbers(name, datatype, dtype, values)
    if array.size != elements(shape):
        expected = f"its shape {list(shape)} has {elements(shape):,}"
        raise RequestError(400, f"input '{name}' has {array.size:,} values; {expected}")
    return array.reshape(shape)


def _numbers(name: str, datatype: str, dtype: np.dtype[Any], values: Any) -> Array:
    if dtype.kind in "iu":
        return _integers(name, datatype, dtype, values)
    try:
        array = np.array(values)
    except (ValueError, OverflowError, RecursionError):
        raise RequestError(400, f"input '{name}': its data are no even lists of numbers") from None
    kinds = {"b": "b", "f": "iuf"}[dtype.kind]
    if array.size and array.dtype.kind not in kinds:
        raise RequestError(400, f"input '{name}': its data must be of the type {datatype}")
    with np.errstate(over="ignore"):
        converted: Array = array.astype(dtype)
    if dtype.kind == "f" and np.isinf(converted).any():
        raise RequestError(400, f"input '{name}': its data do not fit into {datatype}, or are infinite")
    return converted


def _integers(name: str, datatype: str, dtype: np.dtype[Any], values: Any) -> Array:
    types = set(map(type, values)) if isinstance(values, list) else {list}
    flat = _flat(values) if list in types else values
    if not set(map(type, flat)) <= {int}:
        raise RequestError(400, f"input '{name}': its data must be of the type {datatype}")
    bounds = np.iinfo(dtype)
    if flat and not bounds.min <= min(flat) <= max(flat) <= bounds.max:
        raise RequestError(400, f"input '{name}': its data do not fit into {datatype}")
    try:
        return np.array(values, dtype)
    except (ValueError, RecursionError):
        raise RequestError(400, f"input '{name}': its data are no even lists of numbers") from None


def _flat(values: Any) -> list[Any]:
    flat: list[Any] = []
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(reversed(value))
        else:
            flat.append(value)
    return flat


def to_raw(array: Array) -> bytes:
    """Return a tensor's raw bytes."""
    if array.dtype.kind != "O":
        return array.tobytes()
    parts: list[bytes] = []
    for value in array.ravel():
        data = str(value).encode()
        parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def has_nan(array: Array) -> bool:
    """Return whether a float tensor has a NaN: only then its sum of squares is NaN."""
    if array.dtype.itemsize < 4:  # BLAS, which makes the sum fast, lacks these types
        return bool(np.isnan(array).any())
    flat = array.ravel()
    return math.isnan(np.dot(flat, flat))


def nan_error(name: str, array: Array) -> RequestError:
    """Return the error that names the position of an input's first NaN."""
    place = [int(i[0]) for i in np.nonzero(np.isnan(array))]
    return RequestError(400, f"input '{name}' has a NaN at {place}: fill what is missing")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def blocks_of(inputs: Iterable[Array]) -> list[Array]:
    """Return each input as a block of its own."""
    return [x[np.newaxis] for x in inputs]


def inputs_of(blocks: Blocks) -> list[Array]:
    """Return the inputs in order: views."""
    inputs: list[Array] = []
    for block in blocks:
        # Iterating over a block of one dimension would give numbers, not arrays.
        inputs.extend(block if block.ndim > 1 else [block.reshape(())])
    return inputs


def key_of(blocks: Iterable[_Shaped]) -> ShapeKey:
    """Return the key by which requests can be merged."""
    return tuple(x.shape[:1] + x.shape[2:] for x in blocks)


def merged(requests: Sequence[Blocks]) -> list[Array]:
    """Concatenate the blocks of requests, which have the same `key_of`, by rows."""
    return [np.concatenate(parts, axis=1) for parts in zip(*requests, strict=True)]
