"""A saved model of trees as an export of format ONNX."""

from __future__ import annotations

import onnx

from headrace.export.record import MODEL, Graph, Record, Tensor, file_sizes, write_record
from headrace.export.tree_graph import trees_graph
from headrace.models.predictor import ONLY_TASK, read_meta
from headrace.models.xgboost_model import KIND, load_booster
from headrace.schema import DatasetSchema
from headrace.storage import Location

_GRAPH = "model.onnx"
_DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}


def write_xgboost(saved: Location, folder: Location) -> None:
    """Fill a folder with an export.

    Args:
        saved: of the kind `xgboost`.
        folder: empty.

    Raises:
        UserError: the saved model is damaged; see headrace.export.tree_graph.
    """
    meta = read_meta(saved)
    schema = DatasetSchema.model_validate(meta["schema"])
    made = trees_graph(load_booster(saved, schema, meta["files"], None), schema)
    (folder / _GRAPH).put_bytes(made.SerializeToString())
    onnx.checker.check_model(str((folder / _GRAPH).local_path()))
    inputs, outputs = (tuple(map(_tensor, tensors)) for tensors in (made.graph.input, made.graph.output))
    graph = Graph(file=_GRAPH, inputs=inputs, outputs=outputs, files=())
    said = {"pipeline": meta["pipeline"], "ds": meta["ds"], "key": meta["key"]}
    record = Record.model_validate(
        {
            "format": "onnx",
            "class": KIND,
            **said,
            "tables": None,
            "outputs": (ONLY_TASK,),
            "graphs": {MODEL: graph},
            "files": file_sizes(folder),
            "schema": schema,
        }
    )
    write_record(folder, record)


def _tensor(x: onnx.ValueInfoProto) -> Tensor:
    shape = tuple(d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim)
    return Tensor.model_validate({"name": x.name, "dtype": _DTYPES[x.type.tensor_type.elem_type], "shape": shape})
