"""Triton's treatment of a model repository, as far as a repository can be wrong.

Configurations are read by Triton's own protobuf, graphs run in onnxruntime, Python models beside a stub of the back
end, ensembles step by step.

Shapes are looked at as Triton looks at them: a request's against `dims`, a model's behind `reshape`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format, text_format

Tensors = dict[str, np.ndarray[Any, Any]]
DTYPES = {
    "TYPE_STRING": object,
    "TYPE_INT64": np.int64,
    "TYPE_BOOL": np.bool_,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}


@cache
def model_config_pb2() -> Any:
    """tritonclient's module by path: its package's extra asks for an older protobuf."""
    module_spec = importlib.util.find_spec("tritonclient")
    if module_spec is None or module_spec.submodule_search_locations is None:
        pytest.skip("tritonclient is not installed: run `make serve`")
    path = Path(next(iter(module_spec.submodule_search_locations))) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_config(model: Path) -> Any:
    """Raises where the text is none of a ModelConfig, or the name is not the folder's, as Triton does."""
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2().ModelConfig())
    assert config.name == model.name
    for tensor in (*config.input, *config.output):
        assert len(tensor.dims) >= 1
        if tensor.HasField("reshape") and not tensor.reshape.shape:
            assert list(tensor.dims) == [1]
            assert config.max_batch_size > 0
    if config.HasField("ensemble_scheduling"):
        assert not config.instance_group
        assert not config.model_warmup
    for warmup in config.model_warmup:
        assert sorted(warmup.inputs) == sorted(t.name for t in config.input)
        assert all(n > 0 for x in warmup.inputs.values() for n in x.dims)
    return config


class PbTensor:
    def __init__(self, name: str, values: Any) -> None:
        self.values, self._name = np.asarray(values), name

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self.values


class PbResponse:
    def __init__(self, output_tensors: list[PbTensor], error: Any = None) -> None:
        self.tensors, self.error = output_tensors, error


class PbError(Exception):
    pass


class PbRequest:
    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors


def _input(request: PbRequest, name: str) -> PbTensor | None:
    return PbTensor(name, request.tensors[name]) if name in request.tensors else None


def stub() -> types.ModuleType:
    """Return a module in the place of the one that Triton's Python back end brings."""
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = PbTensor, PbResponse, PbError
    module.get_input_tensor_by_name = _input
    return module  # type: ignore[no-any-return]


class Repository:
    """A repository's newest or named versions, loaded when they are first asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[tuple[str, str], Any] = {}

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model, as Triton's VersionsToLoad does."""
        numbers = []
        for entry in (self.folder / name).iterdir():
            if entry.is_dir() and entry.name.lstrip("-+").split(".")[0].isdigit():
                assert entry.name.isdigit(), entry
                numbers.append(int(entry.name))
        return sorted(numbers)

    def ask(self, name: str, tensors: Mapping[str, Any], version: int | None = None) -> Tensors:
        """An answer to a request, whose texts are bytes; the checks are Triton's."""
        config = read_config(self.folder / name)
        batched, rows = config.max_batch_size > 0, 0
        inputs: Tensors = {}
        assert sorted(tensors) == sorted(t.name for t in config.input), name
        for tensor in config.input:
            x = np.asarray(tensors[tensor.name])
            assert x.dtype == DTYPES[_type(tensor)], (name, tensor.name, x.dtype)
            rows = len(x) if batched else 0
            assert rows <= config.max_batch_size
            _check(name, tensor, x.shape[1:] if batched else x.shape)
            inputs[tensor.name] = _inner(tensor, x)
        if config.HasField("ensemble_scheduling"):
            outputs = self._ensemble(config, inputs)
        else:
            version_name = str(version or self.versions(name)[-1])
            assert (self.folder / name / version_name).is_dir(), (name, version_name)
            if (name, version_name) not in self._loaded:
                self._loaded[name, version_name] = _load(self.folder / name, version_name, config)
            outputs = self._loaded[name, version_name](inputs)
        assert sorted(outputs) == sorted(t.name for t in config.output), name
        out = {}
        for tensor in config.output:
            x = outputs[tensor.name]
            if tensor.HasField("reshape"):
                x = x.reshape(len(x), *tensor.dims)
            if x.dtype.kind in "US":
                x = x.astype(object)
            assert x.dtype == DTYPES[_type(tensor)], (name, tensor.name, x.dtype)
            assert not batched or len(x) == rows, (name, tensor.name)
            _check(name, tensor, x.shape[1:] if batched else x.shape)
            out[tensor.name] = x
        return out

    def _ensemble(self, config: Any, request: Tensors) -> Tensors:
        tensors = dict(request)
        waiting = list(config.ensemble_scheduling.step)
        while waiting:
            ready = [s for s in waiting if all(name in tensors for name in s.input_map.values())]
            assert ready, f"{config.name}: no step can go on with {sorted(tensors)}"
            for step in ready:
                step_inputs = {inner: tensors[outer] for inner, outer in step.input_map.items()}
                step_outputs = self.ask(step.model_name, step_inputs, step.model_version)
                tensors |= {outer: step_outputs[inner] for inner, outer in step.output_map.items()}
                waiting.remove(step)
        return {t.name: tensors[t.name] for t in config.output}


def _type(tensor: Any) -> str:
    return str(model_config_pb2().DataType.Name(tensor.data_type))


def _check(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    dims = tuple(tensor.dims)
    is_matching = len(shape) == len(dims) and all(d in (-1, n) for d, n in zip(dims, shape, strict=True))
    assert is_matching, f"{name}: tensor {tensor.name} is {shape}, dims are {dims}"


def _inner(tensor: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.reshape(len(x), *tensor.reshape.shape) if tensor.HasField("reshape") else x


def _load(model: Path, version: str, config: Any) -> Any:
    folder = model / version
    if config.backend == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        assert sorted(x.name for x in session.get_inputs()) == sorted(t.name for t in config.input)
        names = [t.name for t in config.output]

        def graph(tensors: Tensors) -> Tensors:
            texts = {n: _texts(x) if x.dtype == object else x for n, x in tensors.items()}
            return dict(zip(names, session.run(names, texts), strict=True))

        return graph
    if config.backend == "fil":
        import xgboost as xgb

        assert config.parameters["model_type"].string_value == "xgboost_json"
        booster = xgb.Booster()
        booster.load_model(folder / "xgboost.json")
        return lambda tensors: {"output__0": booster.inplace_predict(tensors["input__0"])[:, None]}
    assert config.backend == "python"
    return _python(model, version, config)


def _texts(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([v.decode() for v in x.ravel()], object).reshape(x.shape)


def _python(model: Path, version: str, config: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", stub())
        spec = importlib.util.spec_from_file_location(f"model_{model.name}", model / version / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    python_model = module.TritonPythonModel()
    as_json = json_format.MessageToJson(config, preserving_proto_field_name=True)
    python_model.initialize({"model_config": as_json, "model_repository": str(model), "model_version": version})

    def ask(tensors: Tensors) -> Tensors:
        (response,) = python_model.execute([PbRequest(tensors)])
        if response.error is not None:
            raise response.error
        return {t.name(): t.as_numpy() for t in response.tensors}

    ask.model = python_model  # type: ignore[attr-defined]
    return ask
