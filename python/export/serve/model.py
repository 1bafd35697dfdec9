"""Models of a version: graphs in onnxruntime, and chains of them.

A folder without export.json is the model MODEL. An export has, with the names that it has in a repository of Triton's
(`headrace export --format triton`):

- MODEL.model: rows of codes and numbers to predictions
- MODEL.features: raw columns to such rows, where the export has that graph
- MODEL: both, one behind the other; without MODEL.features the same as MODEL.model
- MODEL.query, MODEL.item: of a model in retrieval form: vectors of a row's query, and of its item
- MODEL.index: a vector to the codes of the items nearest to it, by all dot products
- MODEL.retrieve: MODEL.features, MODEL.query, MODEL.index
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from headrace.export.serve.options import RequestError
from headrace.export.serve.repository import VersionFolder
from headrace.export.serve.tensors import (
    DATATYPES,
    ONNX_TYPES,
    Array,
    Blocks,
    TensorSpec,
    blocks_of,
    has_nan,
    inputs_of,
    nan_error,
)

#: By which is seen, before a version serves, that it runs and that its outputs have a row for each row.
_WARM_UP_ROWS = (1, 3)
#: How a model's name ends that makes features of raw columns, in which a NaN is a missing value.
FEATURES = ".features"

#: Items that MODEL.index gives, best first.
INDEX_ITEMS = 100
#: How outputs of MODEL.features end: a graph's inputs and outputs share one space of names.
_SUFFIX = ".feature"
#: Scores that are made at once.
_SCORES = 1 << 22


class LoadFailure(Exception):
    """Error of a graph that cannot be served."""


class Model:
    """Model that answers under a name.

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
        """Return the outputs in order for inputs in order. Raises RequestError: the model refuses these numbers."""
        raise NotImplementedError

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        """Compute outputs from blocks, as `run` does from inputs."""
        return self.run(inputs_of(blocks))

    def warm_up(self) -> None:
        """Run it, and look whether its outputs have a row for each row. Raises LoadFailure: it does not run."""
        for rows in _WARM_UP_ROWS if self.by_row else (1,):
            try:
                outputs = self.run([_zeros(x, rows) for x in self.inputs])
            except RequestError as e:
                raise LoadFailure(f"a first run fails: {e.message}") from None
            self.by_row = self.by_row and all(x.shape[0] == rows for x in outputs)


class OnnxGraph(Model):
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
            outputs: list[Array] = self._session.run(self._output_names, feeds)
        except Exception as e:
            raise RequestError(400, f"model '{self.name}' cannot compute these rows: {_one_line(e)}") from None
        return outputs


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


def models_of(folder: VersionFolder, threads: int, allow_nan: bool) -> dict[str, Model]:
    """Load a version's models, by their names in requests. Raises LoadFailure, ValueError: the version is damaged."""
    parts, name, version = folder.parts(), folder.model, folder.version
    if not parts.graphs:
        return {name: OnnxGraph(name, version, parts.graph, threads, allow_nan)}
    models: dict[str, Model] = {
        f"{name}.{key}": OnnxGraph(f"{name}.{key}", version, file, threads, allow_nan)
        for key, file in parts.graphs.items()
    }
    features = [models[f"{name}.features"]] if "features" in parts.graphs else []
    if "model" in parts.graphs:
        models[name] = ModelChain(name, version, [*features, models[f"{name}.model"]])
    if parts.items is not None and "query" in parts.graphs:
        models[f"{name}.index"] = index = ItemIndex(f"{name}.index", version, *parts.items)
        models[f"{name}.retrieve"] = ModelChain(
            f"{name}.retrieve", version, [*features, models[f"{name}.query"], index]
        )
    return models


class ModelChain(Model):
    """Models one behind the other: the outputs of each are, by their names, inputs of the next."""

    def __init__(self, name: str, version: int, models: Sequence[Model]) -> None:
        first, last = models[0], models[-1]
        super().__init__(name, version, first.inputs, last.outputs, all(m.by_row for m in models))
        self._first = first
        self._then: list[tuple[Model, list[int]]] = []
        for previous, model in pairwise(models):
            outputs_of = {x.name.removesuffix(_SUFFIX): i for i, x in enumerate(previous.outputs)}
            if missing := [x.name for x in model.inputs if x.name not in outputs_of]:
                raise LoadFailure(
                    f"'{model.name}' asks for {', '.join(missing)}, which '{previous.name}' does not give"
                )
            self._then.append((model, [outputs_of[x.name] for x in model.inputs]))
        self.warm_up()

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        return self.run_blocks(blocks_of(feeds))

    def run_blocks(self, blocks: Blocks) -> list[Array]:
        tensors = self._first.run_blocks(blocks)
        for model, columns in self._then:
            tensors = model.run([tensors[i] for i in columns])
        return tensors


class ItemIndex(Model):
    """Codes of the items with the greatest dot products, best first; -1 and minus infinity behind the last one."""

    def __init__(self, name: str, version: int, file: Path, first_code: int) -> None:
        try:
            self._vectors = np.load(file, mmap_mode="r")[first_code:]
        except (OSError, ValueError) as e:
            raise LoadFailure(f"{file}: {e}") from None
        if self._vectors.ndim != 2 or self._vectors.dtype != np.float32:
            raise LoadFailure(f"{file} must be float32 [items, columns]")
        self._first_code = first_code
        inputs = [TensorSpec("query_vector", "FP32", (-1, self._vectors.shape[1]))]
        outputs = [
            TensorSpec("item_row", "INT64", (-1, INDEX_ITEMS)),
            TensorSpec("item_score", "FP32", (-1, INDEX_ITEMS)),
        ]
        super().__init__(name, version, inputs, outputs, True)

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        (queries,) = feeds
        codes = np.full((len(queries), INDEX_ITEMS), -1, np.int64)
        scores = np.full(codes.shape, -np.inf, np.float32)
        k = min(INDEX_ITEMS, len(self._vectors))
        step = max(1, _SCORES // max(1, len(self._vectors)))
        for start in range(0, len(queries) if k else 0, step):
            products = queries[start : start + step] @ self._vectors.T
            # Of equal scores the lower code comes first, at the border of the best k too.
            order = np.argsort(-products, axis=1, kind="stable")[:, :k]
            codes[start : start + step, :k] = order + self._first_code
            scores[start : start + step, :k] = np.take_along_axis(products, order, 1)
        return [codes, scores]
