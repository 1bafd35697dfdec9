"""Service over gRPC: `inference.GRPCInferenceService`, its messages and methods.

Messages are built from the names and numbers of KServe's "Open Inference Protocol", version 2, and Triton's additions
for model repositories and configurations, in a descriptor pool of their own: the installation needs no protocol
compiler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from headrace.export.serve.infer_json import check_complete, input_of, output_of, rows_of, timeout_of
from headrace.export.serve.loader import ServedModel, Service
from headrace.export.serve.options import CLIENT_GONE, Access, RequestError, RequestLimits
from headrace.export.serve.tensors import DATATYPES, Array, TensorSpec, blocks_of, elements, from_raw, key_of, to_raw

PACKAGE, SERVICE = "inference", "inference.GRPCInferenceService"

_PARAMETERS = "map InferParameter"
_REPOSITORY_PARAMETERS = "map ModelRepositoryParameter"
_NAMED = {"name": (1, "string"), "version": (2, "string")}
#: Number and type of each field, by message. `*` before a type: repeated; `map`: by string; `|`: in the only oneof.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": (1, "string"), "version": (2, "string"), "extensions": (3, "*string")},
    "ModelMetadataRequest": _NAMED,
    "ModelMetadataResponse.TensorMetadata": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "*int64")},
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "*string"),
        "platform": (3, "string"),
        "inputs": (4, "*ModelMetadataResponse.TensorMetadata"),
        "outputs": (5, "*ModelMetadataResponse.TensorMetadata"),
    },
    "InferParameter": {
        "bool_param": (1, "|bool"),
        "int64_param": (2, "|int64"),
        "string_param": (3, "|string"),
        "double_param": (4, "|double"),
        "uint64_param": (5, "|uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "*bool"),
        "int_contents": (2, "*int32"),
        "int64_contents": (3, "*int64"),
        "uint_contents": (4, "*uint32"),
        "uint64_contents": (5, "*uint64"),
        "fp32_contents": (6, "*float"),
        "fp64_contents": (7, "*double"),
        "bytes_contents": (8, "*bytes"),
    },
    "ModelInferRequest.InferInputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest.InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "inputs": (5, "*ModelInferRequest.InferInputTensor"),
        "outputs": (6, "*ModelInferRequest.InferRequestedOutputTensor"),
        "raw_input_contents": (7, "*bytes"),
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "outputs": (5, "*ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "*bytes"),
    },
    "ModelInput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (4, "*int64")},
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (3, "*int64")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "*ModelInput"),
        "output": (6, "*ModelOutput"),
    },
    "ModelConfigRequest": _NAMED,
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelRepositoryParameter": {
        "bool_param": (1, "|bool"),
        "int64_param": (2, "|int64"),
        "string_param": (3, "|string"),
        "bytes_param": (4, "|bytes"),
    },
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse.ModelIndex": {
        "name": (1, "string"),
        "version": (2, "string"),
        "state": (3, "string"),
        "reason": (4, "string"),
    },
    "RepositoryIndexResponse": {"models": (1, "*RepositoryIndexResponse.ModelIndex")},
    "RepositoryModelLoadRequest": {
        "repository_name": (1, "string"),
        "model_name": (2, "string"),
        "parameters": (3, _REPOSITORY_PARAMETERS),
    },
    "RepositoryModelLoadResponse": {},
    "RepositoryModelUnloadRequest": {
        "repository_name": (1, "string"),
        "model_name": (2, "string"),
        "parameters": (3, _REPOSITORY_PARAMETERS),
    },
    "RepositoryModelUnloadResponse": {},
}
#: Methods of the service; the messages are METHODRequest and METHODResponse.
METHODS = tuple(name.removesuffix("Request") for name in _MESSAGES if name.endswith("Request") and "." not in name)

_Field = descriptor_pb2.FieldDescriptorProto

_POOL = descriptor_pool.DescriptorPool()
logger = logging.getLogger(__name__)
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
#: Field of `InferTensorContents` by data type.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_OPEN = ("ServerLive", "ServerReady")
#: Most bytes of a message besides its tensors.
_OVERHEAD = 1 << 20
#: Fewest requests that are answered at the same time, whatever their size.
_FEWEST = 128
#: Data types of `ModelConfig`, numbered from 1.
_TYPES = (*(name for name in DATATYPES if name != "BYTES"), "STRING")
_TYPE_NUMBERS = {f"TYPE_{name}": number for number, name in enumerate(_TYPES, 1)}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="headrace/open_inference.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, Any] = {}
    for path in sorted(_MESSAGES, key=lambda p: p.count(".")):
        outer, _, name = path.rpartition(".")
        message = (messages[outer].nested_type if outer else file.message_type).add(name=name)
        messages[path] = message
        for field, (number, kind) in _MESSAGES[path].items():
            _add_field(message, path, field, number, kind)
    return file


def _add_field(message: Any, path: str, field: str, number: int, kind: str) -> None:
    label = _Field.LABEL_REPEATED if kind[0] == "*" or kind.startswith("map ") else _Field.LABEL_OPTIONAL
    added = message.field.add(name=field, number=number, label=label)
    if kind[0] == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        added.oneof_index = 0
    if kind.startswith("map "):
        entry = message.nested_type.add(name="".join(w.capitalize() for w in field.split("_")) + "Entry")
        entry.options.map_entry = True
        _set_type(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), "string")
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind.removeprefix("map "))
        _set_type(added, f"{path}.{entry.name}")
    else:
        _set_type(added, kind.lstrip("*|"))


def _set_type(field: Any, kind: str) -> None:
    if kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")


_POOL.Add(_file())


def message(name: str) -> Any:
    """Return the class of a message, such as `ModelInferRequest`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


_Request, _InferResponse = message("ModelInferRequest"), message("ModelInferResponse")


class GrpcMethods:
    """The service's methods, by their names."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ServerLive(self, request: Any) -> dict[str, Any]:
        return {"live": True}

    async def ServerReady(self, request: Any) -> dict[str, Any]:
        return {"ready": self._service.ready}

    async def ModelReady(self, request: Any) -> dict[str, Any]:
        return {"ready": self._service.has(request.name, request.version)}

    async def ServerMetadata(self, request: Any) -> dict[str, Any]:
        return self._service.server()

    async def ModelMetadata(self, request: Any) -> dict[str, Any]:
        return self._service.metadata(request.name, request.version)

    async def ModelConfig(self, request: Any) -> dict[str, Any]:
        config = self._service.config(request.name, request.version)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = _TYPE_NUMBERS[tensor["data_type"]]
        return {"config": config}

    async def RepositoryIndex(self, request: Any) -> dict[str, Any]:
        models = await self._service.loader.index()
        return {"models": [m for m in models if not request.ready or m["state"] == "READY"]}

    async def RepositoryModelLoad(self, request: Any) -> dict[str, Any]:
        if request.parameters:
            raise RequestError(400, "parameters of loading are not served: models come from the repository")
        await self._service.loader.load(request.model_name)
        return {}

    async def RepositoryModelUnload(self, request: Any) -> dict[str, Any]:
        await self._service.loader.unload(request.model_name)
        return {}

    async def ModelInfer(self, request: Any) -> Any:
        served = self._service.find(request.model_name, request.model_version)
        limits = self._service.options.limits
        feeds = _feeds(served, request)
        rows = rows_of(served.model, [x.shape for x in feeds], limits)
        timeout = timeout_of(_parameter(request, "timeout"), limits)
        indices = [output_of(served.model, x.name) for x in request.outputs] or range(len(served.model.outputs))
        blocks = blocks_of(feeds)
        outputs = await served.batcher.submit(blocks, rows, key_of(blocks), timeout)
        answer = _InferResponse(model_name=served.model.name, model_version=str(served.model.version), id=request.id)
        for i in indices:
            spec = served.model.outputs[i]
            answer.outputs.add(name=spec.name, datatype=spec.datatype, shape=outputs[i].shape)
            answer.raw_output_contents.append(to_raw(outputs[i]))
        return answer


def _parameter(request: Any, name: str) -> Any:
    if name not in request.parameters:
        return None
    value = request.parameters[name]
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def _feeds(served: ServedModel, request: Any) -> list[Array]:
    model, raws = served.model, request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise RequestError(400, f"{len(raws)} raw tensors for {len(request.inputs)} inputs")
    tensors: dict[str, Array] = {}
    for i, tensor in enumerate(request.inputs):
        spec = input_of(model, tensor.name, tensors)
        shape = spec.check(tensor.datatype, list(tensor.shape))
        if raws:
            tensors[spec.name] = from_raw(spec.name, spec.datatype, shape, raws[i])
        else:
            tensors[spec.name] = _of_contents(spec, shape, tensor.contents)
    check_complete(model, tensors)
    return [tensors[x.name] for x in model.inputs]


def _of_contents(spec: TensorSpec, shape: tuple[int, ...], contents: Any) -> Array:
    field = _CONTENTS.get(spec.datatype)
    if field is None:
        raise RequestError(400, f"input '{spec.name}' of {spec.datatype} must be a raw tensor")
    values: Sequence[Any] = getattr(contents, field)
    if spec.datatype == "BYTES":
        try:
            values = [v.decode() for v in values]
        except UnicodeDecodeError:
            raise RequestError(400, f"input '{spec.name}': a string is not UTF-8") from None
    if len(values) != elements(shape):
        raise RequestError(400, f"input '{spec.name}' has {len(values):,} values; its shape is {list(shape)}")
    dtype = DATATYPES[spec.datatype]
    if dtype.kind in "iu" and values and not np.iinfo(dtype).min <= min(values) <= max(values) <= np.iinfo(dtype).max:
        raise RequestError(400, f"input '{spec.name}': its values do not fit into {spec.datatype}")
    return np.array(values, dtype).reshape(shape)


def _handler(service: Service, access: Access, name: str, method: Callable[[Any], Awaitable[Any]]) -> Any:
    response = message(f"{name}Response")
    answered: dict[int, Any] = {}

    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        started, status, size = time.perf_counter(), 200, 0
        try:
            if name not in _OPEN:
                authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
                access.check(authorization if isinstance(authorization, bytes) else str(authorization).encode())
            if request is None:
                raise RequestError(400, f"the bytes are no {name}Request")
            if name == "ModelInfer":
                service.take_bytes(count := request.ByteSize())
                size = count
            result = await method(request)
            return result if isinstance(result, response) else response(**result)
        except RequestError as e:
            status = e.status
            if e.retry_after is not None:
                context.set_trailing_metadata((("retry-after", str(e.retry_after)),))
            await context.abort(_CODES.get(e.status, grpc.StatusCode.INTERNAL), e.message)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:  # or its deadline has passed
            status = CLIENT_GONE
            raise
        except Exception:
            logger.exception("%s failed", name)
            status = 500
            await context.abort(grpc.StatusCode.INTERNAL, "an error of the server: see its log")
        finally:
            service.give_back(size)
            counter = answered.get(status)
            if counter is None:
                counter = answered[status] = service.metrics.requests.labels("grpc", str(status))
            counter.inc()
            service.metrics.seconds.observe(time.perf_counter() - started)

    request_class = message(f"{name}Request")

    def parse(data: bytes) -> Any:
        try:
            return request_class.FromString(data)
        except DecodeError:
            return None

    return grpc.unary_unary_rpc_method_handler(handle, parse, response.SerializeToString)


def concurrent_requests(limits: RequestLimits) -> int:
    """Return the most requests at the same time: each is completely in memory before its bytes can be counted."""
    return min(limits.connections, max(_FEWEST, limits.pending_bytes // (limits.body_bytes + _OVERHEAD)))


def make_server(service: Service) -> grpc.aio.Server:
    """Create the server, not yet bound to an address."""
    options, limits = service.options, service.options.limits
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limits.body_bytes + _OVERHEAD),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.max_connection_idle_ms", limits.idle_seconds * 1000),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=concurrent_requests(limits),
    )
    access, methods = Access(options.token), GrpcMethods(service)
    handlers = {name: _handler(service, access, name, getattr(methods, name)) for name in METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server


def listen(server: grpc.aio.Server, service: Service) -> int:
    """Bind the server to its address, and return the port. Raises RuntimeError if the address is in use."""
    options = service.options
    address = f"{f'[{options.host}]' if ':' in options.host else options.host}:{options.grpc_port}"
    if options.certificate is None or options.key is None:
        return int(server.add_insecure_port(address))
    pair = (options.key.read_bytes(), options.certificate.read_bytes())
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
