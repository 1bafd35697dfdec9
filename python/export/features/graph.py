"""Writer of an ONNX graph: nodes and constants with generated names, and columns between operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from headrace.storage import Location

#: Versions of the operator sets ai.onnx and ai.onnx.ml, and of the file format.
OPSET, ML_OPSET, IR_VERSION = 21, 4, 10
ML = "ai.onnx.ml"
BOOL, INT64, UINT64 = TensorProto.BOOL, TensorProto.INT64, TensorProto.UINT64
FLOAT, DOUBLE, STRING = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.STRING


class GraphWriter:
    """Nodes in the order in which they compute."""

    def __init__(self, folder: Location, file_prefix: str = "vocabulary") -> None:
        """Start an empty graph; large constants are files `PREFIX-N.bin` in `folder`."""
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._folder, self._prefix = folder, file_prefix
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        #: Names of the files that the graph reads.
        self.files: list[str] = []

    def add(self, op: str, *inputs: str, domain: str = "", outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node of one output and return its name."""
        name = outputs[0] if outputs else f"node.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Return a small tensor; equal ones are stored once."""
        array = np.asarray(value, dtype)
        content = "\0".join(array.ravel().tolist()).encode() if array.dtype == object else array.tobytes()
        key = (str(array.dtype), array.shape, content)
        if key not in self._constants:
            name = f"constant.{len(self.initializers)}"
            self.initializers.append(_tensor(array, name))
            self._constants[key] = name
        return self._constants[key]

    def file(self, values: NDArray[Any]) -> str:
        """Write a large tensor into a file beside the graph, which the runtime maps."""
        name = f"{self._prefix}-{len(self.files)}.bin"
        with (self._folder / name).new_file() as path:
            np.ascontiguousarray(values).tofile(path)
        self.files.append(name)
        tensor = TensorProto(
            name=f"table.{name}", data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=list(values.shape)
        )
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", "0"), ("length", str(values.nbytes))):
            tensor.external_data.add(key=key, value=value)
        self.initializers.append(tensor)
        return str(tensor.name)

    def prune(self, outputs: Sequence[str]) -> None:
        """Remove nodes, constants and files that the outputs do not need."""
        needed, kept_nodes = set(outputs), []
        for node in reversed(self.nodes):
            if set(node.output) & needed:
                needed.update(node.input)
                kept_nodes.append(node)
        self.nodes = kept_nodes[::-1]
        self.initializers = [x for x in self.initializers if x.name in needed]
        for name in [name for name in self.files if f"table.{name}" not in needed]:
            (self._folder / name).remove()
            self.files.remove(name)

    def cast(self, x: str, to: int) -> str:
        """Convert numbers to another type."""
        return self.add("Cast", x, to=to)

    def select(self, condition: str, yes: str, no: str) -> str:
        """Return `yes` where the condition is true, else `no`, element by element."""
        return self.add("Where", condition, yes, no)

    def either(self, a: str | None, b: str | None) -> str | None:
        """Return `a or b` of two conditions; None is a condition that is false everywhere."""
        if a is None or b is None or a == b:
            return a or b
        return self.add("Or", a, b)

    def unsqueeze(self, x: str, axis: int) -> str:
        """Add a dimension."""
        return self.add("Unsqueeze", x, self.constant([axis], np.int64))

    def size(self, x: str, axis: int) -> str:
        """Return the length of a dimension: int64, a scalar."""
        shape = self.add("Shape", x, start=axis, end=axis + 1)
        return self.add("Squeeze", shape, self.constant([0], np.int64))

    def false_like(self, x: str) -> str:
        """Return False in the shape of another tensor."""
        none = helper.make_tensor("value", BOOL, [1], [False])
        return self.add("ConstantOfShape", self.add("Shape", x), value=none)

    def label_encoder(self, x: str, keys: NDArray[Any], values: NDArray[np.int64], default: int) -> str:
        """Return the value of each key, `default` of others. Keys int64, or objects: texts. [..] -> int64 [..]."""
        return self.add(
            "LabelEncoder",
            x,
            domain=ML,
            keys_tensor=_tensor(keys, "keys"),
            values_tensor=_tensor(np.asarray(values, np.int64), "values"),
            default_tensor=_tensor(np.array([default], np.int64), "default"),
        )


def _tensor(array: NDArray[Any], name: str) -> Any:
    if array.dtype != object:
        return numpy_helper.from_array(array, name)
    return helper.make_tensor(name, STRING, list(array.shape), [v.encode() for v in array.ravel().tolist()])


@dataclass(frozen=True)
class Value:
    """A column between two operators.

    Attributes:
        name: name of the tensor, [rows], or for a list [rows, length]. Reals are float64; integers, times, codes and
            raw ids int64; others string or bool.
        kind: real, int, bool or text.
        missing: name of a bool tensor of the same shape that is True for missing values; None: none is missing. A
            missing real is NaN.
        length: name of the lists' lengths, int64 [rows]; None: no list.
    """

    name: str
    kind: str
    missing: str | None = None
    length: str | None = None

    def with_name(self, name: str, kind: str | None = None) -> Value:
        """Return a column with other values and the same lists and missing values."""
        return replace(self, name=name, kind=kind or self.kind)


def real(x: Value, name: str) -> Value:
    """Return numbers float64 in the lists of x, NaN where they are missing."""
    return Value(name, "real", None, x.length)


def doubles(graph: GraphWriter, x: Value) -> str:
    """Return any numbers as float64, NaN where they are missing."""
    if x.kind == "real":
        return x.name
    out = graph.cast(x.name, DOUBLE)
    return out if x.missing is None else graph.select(x.missing, graph.constant(np.nan, np.float64), out)


def integers(graph: GraphWriter, x: Value) -> str:
    """Return integers and booleans as int64."""
    return graph.cast(x.name, INT64) if x.kind == "bool" else x.name


def missing_of(graph: GraphWriter, x: Value) -> str | None:
    """Return a mask that is True where a value is missing, or None where none is."""
    return graph.add("IsNaN", x.name) if x.kind == "real" else x.missing


def zero_missing(graph: GraphWriter, x: Value, name: str) -> str:
    """Return int64 numbers with 0 where x is missing."""
    missing = missing_of(graph, x)
    return name if missing is None else graph.select(missing, graph.constant(0, np.int64), name)


def part(graph: GraphWriter, x: Value, start: str, columns: str, length: str) -> Value:
    """Return `columns` (int64, a scalar) elements of each list from `start` int64 [rows, 1] on, of which the first
    `length` int64 [rows] belong to the list.
    """
    last = graph.add("Sub", graph.size(x.name, 1), graph.constant(1, np.int64))
    step = graph.constant(1, np.int64)
    places = graph.add("Add", start, graph.add("Range", graph.constant(0, np.int64), columns, step))
    places = graph.add("Min", graph.add("Max", places, graph.constant(0, np.int64)), last)
    rows = graph.add("Concat", graph.add("Shape", x.name, start=0, end=1), graph.unsqueeze(columns, 0), axis=0)
    places = graph.add("Expand", places, rows)
    name = graph.add("GatherElements", x.name, places, axis=1)
    missing = None if x.missing is None else graph.add("GatherElements", x.missing, places, axis=1)
    return Value(name, x.kind, missing, length)


def behind_the_end(graph: GraphWriter, x: Value) -> str:
    """Return a mask [rows, length] that is True for elements beyond each list's end."""
    assert x.length is not None
    zero, step = graph.constant(0, np.int64), graph.constant(1, np.int64)
    places = graph.unsqueeze(graph.add("Range", zero, graph.size(x.name, 1), step), 0)
    return graph.add("GreaterOrEqual", places, graph.unsqueeze(x.length, 1))
