"""Messages of `inference.GRPCInferenceService`, made of the public protocol's names and numbers.

KServe's "Open Inference Protocol", version 2, and Triton's additions to it for model repositories and configurations.
They are made here, in a pool of their own, so that no compiler of protocols belongs to the installation.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE, SERVICE = "inference", "inference.GRPCInferenceService"

_PARAMETERS = "map InferParameter"
_REPOSITORY_PARAMETERS = "map ModelRepositoryParameter"
_NAMED = {"name": (1, "string"), "version": (2, "string")}
#: By message, by field: number and type. `*` before a type: repeated; `map`: by string; `|`: of the one oneof.
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


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="headrace/open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for path in sorted(_MESSAGES, key=lambda p: p.count(".")):
        outer, _, name = path.rpartition(".")
        message = (made[outer].nested_type if outer else file.message_type).add(name=name)
        made[path] = message
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


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def message(name: str) -> Any:
    """The class of a message, such as `ModelInferRequest`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
