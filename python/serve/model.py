"""What answers under a name: a graph in onnxruntime, or what is made of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from headrace.serve.blocks import Blocks, blocks_of, inputs_of
from headrace.serve.errors import RequestError
from headrace.serve.tensors import DATATYPES, ONNX_TYPES, Array, TensorSpec, has_nan, nan_error

#: By which is seen, before a version serves, that it runs and that its outputs have a row for each row.
_WARM_UP_ROWS = (1, 3)
#: How a model's name ends that makes features of raw columns, in which a NaN is a missing value.
FEATURES = ".features"


class LoadFailure(Exception):
    """A graph that cannot be served; says why."""


class Model:
    """What answers under a name.

    Attributes:
        name: of the model.
        version: of it.
        inputs: in order.
        outputs: the same.
        by_row: whether every tensor's first dimension is rows: requests can be merged.
    """

    def __init__(
        self, name: str, version: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], by_row: bool
    ) -> None:
        self.name, self.version = name, version
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.input_index = {x.name: i for i, x in enumerate(self.inputs)}
        self.output_index = {x.name: i for i, x in enumerate(self.outputs)}
        self.by_row = by_row

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        """Outputs in order from inputs in order. Raises RequestError: the model refuses these numbers."""
        raise NotImplementedError

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        """As `run`, of blocks."""
        return self.run(inputs_of(blocks))

    def warm_up(self) -> None:
        """Run it, and look whether its outputs have a row for each row. Raises LoadFailure: it does not run."""
        for rows in _WARM_UP_ROWS if self.by_row else (1,):
            try:
                outputs = self.run([_zeros(x, rows) for x in self.inputs])
            except RequestError as e:
                raise LoadFailure(f"a first run fails: {e.message}") from None
            self.by_row = self.by_row and all(x.shape[0] == rows for x in outputs)


class Graph(Model):
    """One ONNX graph."""

    def __init__(self, name: str, version: int, graph: Path, threads: int, allow_nan: bool = False) -> None:
        """`allow_nan`: whether a NaN is a value of inputs."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Waiting threads leave the cores to those who read requests.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as e:  # its classes are many, and have no base of their own
            raise LoadFailure(f"onnxruntime {onnxruntime.__version__}: {_one_line(e)}") from None
        inputs = [_spec(x) for x in self._session.get_inputs()]
        outputs = [_spec(x) for x in self._session.get_outputs()]
        by_row = all(x.shape and x.shape[0] == -1 for x in (*inputs, *outputs))
        super().__init__(name, version, inputs, outputs, by_row)
        self._names = [x.name for x in inputs]
        self._output_names = [x.name for x in outputs]
        self._allow_nan = allow_nan or name.endswith(FEATURES)
        self.warm_up()

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        return self.run_blocks(blocks_of(feeds))

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        # Raw tensors are where they came to lie in a request. onnxruntime reads such memory as it is, by kernels that
        # compilers may have made for addresses that fit the type.
        blocks = [x if x.flags.aligned else x.copy() for x in blocks]
        feeds = dict(zip(self._names, inputs_of(blocks), strict=True))
        if not self._allow_nan and any(x.dtype.kind == "f" and has_nan(x) for x in blocks):
            raise next(nan_error(n, x) for n, x in feeds.items() if x.dtype.kind == "f" and has_nan(x))
        try:
            found: list[Array] = self._session.run(self._output_names, feeds)
        except Exception as e:
            raise RequestError(400, f"model '{self.name}' cannot compute these rows: {_one_line(e)}") from None
        return found


def _spec(x: Any) -> TensorSpec:
    datatype = ONNX_TYPES.get(x.type)
    if datatype is None:
        raise LoadFailure(f"'{x.name}' is a {x.type}, which the protocol has no type for")
    return TensorSpec(x.name, datatype, tuple(n if isinstance(n, int) and n >= 0 else -1 for n in x.shape))


def _zeros(spec: TensorSpec, rows: int) -> Array:
    shape = tuple((rows if i == 0 else 1) if n == -1 else n for i, n in enumerate(spec.shape))
    if spec.datatype == "BYTES":
        return np.full(shape, "", object)
    return np.zeros(shape, DATATYPES[spec.datatype])


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())[:500]
