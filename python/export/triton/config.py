"""`config.pbtxt` of a model: the text form of Triton's ModelConfig (model_config.proto of its repository `common`).

The module also has the tensors of graphs, columns and features in a configuration, and the options of a repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.config.schema import Feature, Kind
from headrace.export.features.columns import FEATURE, RawColumn
from headrace.export.record import GraphTensor

#: Triton's types by NumPy's names; `object` for texts.
TYPES = {
    "object": "TYPE_STRING",
    "int64": "TYPE_INT64",
    "bool": "TYPE_BOOL",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
Backend = Literal["onnxruntime", "python", "fil"]
#: A dimension that each request sets.
ANY = -1


@dataclass(frozen=True)
class TritonTensor:
    """An input or output of a request; its shape leaves out rows, unless the model does not batch.

    Attributes:
        reshape: shape of the model's own tensor in place of `dims`, which then has one element. It is () for a tensor
            [rows], since Triton's tensors have at least one dimension besides rows.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class EnsembleStep:
    """A model of an ensemble; `inputs` and `outputs` map names of its tensors to those of the ensemble."""

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Batching:
    """Settings of dynamic batching.

    Attributes:
        max_rows: most rows of a batch, and of a request.
        delay_microseconds: time that the first request waits for others.
        instances: number of copies of a model that run at the same time.
    """

    max_rows: int = 4096
    delay_microseconds: int = 500
    instances: int = 1


#: Format of trees in a repository; method of an index.
TreesAs = Literal["onnx", "fil"]
IndexAs = Literal["exact", "faiss"]


@dataclass(frozen=True)
class Options:
    """Options of the models in a repository.

    Attributes:
        batching: batching of each model.
        trees: format of boosted trees: an ONNX graph, or XGBoost's own file for the FIL back end.
        candidates: number of items that an index returns for a user.
        index: search of an index: all vectors, or Faiss's inverted lists.
        keep: number of versions to keep in a repository.
    """

    batching: Batching = field(default_factory=Batching)
    trees: TreesAs = "onnx"
    candidates: int = 100
    index: IndexAs = "exact"
    keep: int = 2


DEFAULTS = Options()


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model; with `steps`, of an ensemble."""

    name: str
    inputs: tuple[TritonTensor, ...]
    outputs: tuple[TritonTensor, ...]
    batching: Batching
    backend: Backend | None = None
    #: True if rows are the tensors' first dimension, which `dims` omit.
    batched: bool = True
    steps: tuple[EnsembleStep, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    #: Device of the model; KIND_AUTO takes a GPU if there is one.
    kind: str = "KIND_AUTO"

    def text(self) -> str:
        """Return the configuration file's text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"name: {_quoted(self.name)}"
        yield 'platform: "ensemble"' if self.backend is None else f"backend: {_quoted(self.backend)}"
        yield f"max_batch_size: {self.batching.max_rows if self.batched else 0}"
        for section, tensors in (("input", self.inputs), ("output", self.outputs)):
            for tensor in tensors:
                yield f"{section} {{"
                yield from _tensor_lines(tensor)
                yield "}"
        if self.backend is None:
            yield from _ensemble_lines(self.steps)
            # The only version of an ensemble; its steps name the versions of the models.
            yield "version_policy { latest { num_versions: 1 } }"
        else:
            yield "version_policy { all { } }"
            yield f"instance_group {{ count: {self.batching.instances} kind: {self.kind} }}"
            if self.batched:
                yield f"dynamic_batching {{ max_queue_delay_microseconds: {self.batching.delay_microseconds} }}"
            yield from self._warmup()
        for key, value in self.parameters.items():
            yield f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"

    def _warmup(self) -> Iterator[str]:
        """Yield a request of one row: zeros, empty texts, lists of one element."""
        yield "model_warmup {"
        yield '  name: "one row of zeros"'
        yield f"  batch_size: {1 if self.batched else 0}"
        for tensor in self.inputs:
            dims = _numbers(1 if n == ANY else n for n in tensor.dims)
            value = f"data_type: {TYPES[tensor.dtype]} dims: {dims} zero_data: true"
            yield f"  inputs {{ key: {_quoted(tensor.name)} value {{ {value} }} }}"
        yield "}"


def _tensor_lines(tensor: TritonTensor) -> Iterator[str]:
    yield f"  name: {_quoted(tensor.name)}"
    yield f"  data_type: {TYPES[tensor.dtype]}"
    yield f"  dims: {_numbers(tensor.dims)}"
    if tensor.reshape is not None:
        yield f"  reshape {{ shape: {_numbers(tensor.reshape)} }}"


def step_text(model: str, version: int) -> str:
    """Return the lines of an ensemble's configuration that name a version of a model."""
    return f"    model_name: {_quoted(model)}\n    model_version: {version}"


def _ensemble_lines(steps: Sequence[EnsembleStep]) -> Iterator[str]:
    yield "ensemble_scheduling {"
    for step in steps:
        yield "  step {"
        yield step_text(step.model, step.version)
        for map_name, names in (("input_map", step.inputs), ("output_map", step.outputs)):
            for key, value in names.items():
                yield f"    {map_name} {{ key: {_quoted(key)} value: {_quoted(value)} }}"
        yield "  }"
    yield "}"


def _numbers(numbers: Iterator[int] | Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _quoted(text: str) -> str:
    """Return a text in quotes with JSON's escapes, which protobuf shares; other characters stay UTF-8."""
    return json.dumps(text, ensure_ascii=False)


def graph_tensor(tensor: GraphTensor) -> TritonTensor:
    """Return a graph's tensor, whose first dimension is the rows."""
    return _tensor(tensor.name, tensor.dtype, tuple(ANY if isinstance(n, str) else n for n in tensor.shape[1:]))


def column_tensors(columns: Sequence[RawColumn]) -> tuple[TritonTensor, ...]:
    """Return the tensors of a request with columns of the lake's table."""
    return tuple(_tensor(t.name, t.dtype, (ANY,) * (len(t.shape) - 1)) for column in columns for t in column.tensors)


def feature_tensor(feature: Feature) -> TritonTensor:
    """Return a feature's tensor; see headrace.export.features.graph_file."""
    codes = feature.kind is Kind.CATEGORICAL
    dims = () if codes and not feature.is_list else (feature.length,)
    return _tensor(f"{feature.name}{FEATURE}", "int64" if codes else "float32", dims)


def without_reshape(tensors: Sequence[TritonTensor]) -> tuple[TritonTensor, ...]:
    """Return tensors with their shapes in requests, for ensembles and Python models."""
    return tuple(TritonTensor(t.name, t.dtype, t.dims) for t in tensors)


def with_rows(tensors: Sequence[TritonTensor]) -> tuple[TritonTensor, ...]:
    """Return tensors for a model without batches, whose shapes begin with the rows."""
    return tuple(TritonTensor(t.name, t.dtype, (ANY, *t.dims)) for t in tensors)


def _tensor(name: str, dtype: str, dims: tuple[int, ...]) -> TritonTensor:
    return TritonTensor(name, dtype, dims) if dims else TritonTensor(name, dtype, (1,), ())
