"""The features' graph as one more graph of an export."""

from __future__ import annotations

from headrace.export.features.columns import FEATURE, RawTensor
from headrace.export.features.graph_file import FeaturesGraph, faults, write_features
from headrace.export.record import Graph, Tensor, file_sizes, read_record, write_record
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.schema import Feature, Kind
from headrace.storage import Location

#: The graph's name in the record.
FEATURES = "features"
_FILE = "features.onnx"
_ROWS = "rows"


def add_features(folder: Location, workflow: FittedWorkflow) -> list[str]:
    """Write the graph of the features that an export's graphs ask for beside them, and name it in the record.

    Args:
        folder: of the export, which is being filled.
        workflow: of the saved model.

    Returns:
        what ONNX has no operators for: then nothing is written.
    """
    record = read_record(folder)
    asked = {tensor.name for graph in record.graphs.values() for tensor in graph.inputs}
    if lacking := faults(workflow, asked):
        return lacking
    made = write_features(workflow, folder, _FILE, asked)
    graphs = {**record.graphs, FEATURES: _graph(made)}
    write_record(folder, record.model_copy(update={"graphs": graphs, "files": file_sizes(folder)}))
    return []


def _graph(made: FeaturesGraph) -> Graph:
    inputs = tuple(_input(tensor) for column in made.columns for tensor in column.tensors)
    return Graph(file=_FILE, inputs=inputs, outputs=tuple(map(_output, made.features)), files=made.files)


def _input(tensor: RawTensor) -> Tensor:
    dtype = "string" if tensor.dtype == "object" else tensor.dtype
    return Tensor.model_validate({"name": tensor.name, "dtype": dtype, "shape": tensor.shape})


def _output(feature: Feature) -> Tensor:
    codes = feature.kind is Kind.CATEGORICAL
    shape = (_ROWS,) if codes and not feature.is_list else (_ROWS, feature.length)
    return Tensor(name=f"{feature.name}{FEATURE}", dtype="int64" if codes else "float32", shape=shape)
