"""The gRPC side."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from headrace.serve.access import Access
from headrace.serve.blocks import blocks_of, key_of
from headrace.serve.catalogue import Served
from headrace.serve.errors import CLIENT_GONE, RequestError
from headrace.serve.grpc_messages import METHODS, SERVICE, message
from headrace.serve.infer_json import check_complete, input_of, output_of, rows_of, timeout_of
from headrace.serve.options import Limits
from headrace.serve.service import Service
from headrace.serve.tensors import DATATYPES, Array, TensorSpec, elements, from_raw, to_raw

logger = logging.getLogger(__name__)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
#: Where typed contents are.
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
#: What a message has beside its tensors, at most.
_OVERHEAD = 1 << 20
#: Requests that are answered at the same time however large they may be.
_FEWEST = 128

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


#: Of `ModelConfig`'s data types, from 1 on.
_TYPES = (*(name for name in DATATYPES if name != "BYTES"), "STRING")
_TYPE_NUMBERS = {f"TYPE_{name}": number for number, name in enumerate(_TYPES, 1)}


def _parameter(request: Any, name: str) -> Any:
    if name not in request.parameters:
        return None
    value = request.parameters[name]
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def _feeds(served: Served, request: Any) -> list[Array]:
    model, raws = served.model, request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise RequestError(400, f"{len(raws)} raw tensors for {len(request.inputs)} inputs")
    found: dict[str, Array] = {}
    for i, tensor in enumerate(request.inputs):
        spec = input_of(model, tensor.name, found)
        shape = spec.check(tensor.datatype, list(tensor.shape))
        if raws:
            found[spec.name] = from_raw(spec.name, spec.datatype, shape, raws[i])
        else:
            found[spec.name] = _of_contents(spec, shape, tensor.contents)
    check_complete(model, found)
    return [found[x.name] for x in model.inputs]


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
                given = dict(context.invocation_metadata() or ()).get("authorization", "")
                access.check(given if isinstance(given, bytes) else str(given).encode())
            if request is None:
                raise RequestError(400, f"the bytes are no {name}Request")
            if name == "ModelInfer":
                service.take_bytes(count := request.ByteSize())
                size = count
            found = await method(request)
            return found if isinstance(found, response) else response(**found)
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


def concurrent_requests(limits: Limits) -> int:
    """At the same time: each is in memory as a whole before its bytes can be counted."""
    return min(limits.connections, max(_FEWEST, limits.pending_bytes // (limits.body_bytes + _OVERHEAD)))


def make_server(service: Service) -> grpc.aio.Server:
    """The service, with no address yet."""
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
    """Bind the server to its address; the port. Raises RuntimeError: it is taken."""
    options = service.options
    address = f"{f'[{options.host}]' if ':' in options.host else options.host}:{options.grpc_port}"
    if options.certificate is None or options.key is None:
        return int(server.add_insecure_port(address))
    pair = (options.key.read_bytes(), options.certificate.read_bytes())
    return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
