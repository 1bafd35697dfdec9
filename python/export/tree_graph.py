"""Boosted trees as an ONNX graph, from the features' tensors to the predictions of `XGBoostPredictor`.

The converter of onnxmltools (1.16) returns other numbers for `rank:*` and `reg:logistic`, and has no sets of codes. So
this module converts XGBoost's own JSON to ONNX's TreeEnsemble.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import xgboost as xgb
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.export.record import MODEL, ExportedGraph, ExportRecord, GraphTensor, file_sizes, write_record
from headrace.models.predictor import ONLY_TASK, read_meta
from headrace.models.xgboost_model import KIND, load_booster, matrix_columns, matrix_features
from headrace.storage import Location

ROWS = "rows"
#: Names of the tensors: the trees' input, and the sums of the trees.
MATRIX, SCORES = "matrix", "scores"
#: Versions of the operator sets and of the file format.
_OPSET, _ML_OPSET, _IR_VERSION = 21, 5, 10
_ML = "ai.onnx.ml"
#: Modes of TreeEnsemble's nodes. The true branch takes values below the split, or members of the node's set.
_LESS, _MEMBER = 1, 6
_RESERVED = ("tree.", MATRIX, SCORES, ONLY_TASK)
_GRAPH = "model.onnx"
_DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}


def faults(booster: xgb.Booster) -> list[str]:
    """Return a sentence for each property of trees that cannot be exported."""
    learner = json.loads(booster.save_raw("json"))["learner"]
    name, reasons = learner["objective"]["name"], []
    if learner["gradient_booster"]["name"] != "gbtree":
        reasons.append(f"the booster '{learner['gradient_booster']['name']}', whose trees have weights")
    if _link(name) is None:
        reasons.append(f"the objective '{name}'")
    if int(learner["learner_model_param"]["num_class"]) > 1 or int(learner["learner_model_param"]["num_target"]) > 1:
        reasons.append("several outputs of one model")
    return reasons


def check_exportable(booster: xgb.Booster) -> None:
    """Raise UserError if trees cannot be exported; the message names all reasons."""
    if reasons := faults(booster):
        raise UserError("the trees cannot be exported as ONNX: " + "; ".join(reasons))


def write_xgboost(saved: Location, folder: Location) -> None:
    """Write an export of format ONNX of a saved model of trees.

    Args:
        saved: saved model of the kind `xgboost`.
        folder: an empty folder.

    Raises:
        UserError: the saved model is damaged; see `check_exportable`.
    """
    meta = read_meta(saved)
    schema = DatasetSchema.model_validate(meta["schema"])
    model = trees_graph(load_booster(saved, schema, meta["files"], None), schema)
    (folder / _GRAPH).put_bytes(model.SerializeToString())
    onnx.checker.check_model(str((folder / _GRAPH).local_path()))
    inputs, outputs = (tuple(map(_graph_tensor, tensors)) for tensors in (model.graph.input, model.graph.output))
    graph = ExportedGraph(file=_GRAPH, inputs=inputs, outputs=outputs, files=())
    origin = {"pipeline": meta["pipeline"], "ds": meta["ds"], "key": meta["key"]}
    record = ExportRecord.model_validate(
        {
            "format": "onnx",
            "class": KIND,
            **origin,
            "tables": None,
            "outputs": (ONLY_TASK,),
            "graphs": {MODEL: graph},
            "files": file_sizes(folder),
            "schema": schema,
        }
    )
    write_record(folder, record)


def _graph_tensor(x: onnx.ValueInfoProto) -> GraphTensor:
    shape = tuple(d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim)
    return GraphTensor.model_validate({"name": x.name, "dtype": _DTYPES[x.type.tensor_type.elem_type], "shape": shape})


def trees_graph(booster: xgb.Booster, schema: DatasetSchema) -> Any:
    """Return the model (`onnx.ModelProto`), from features by name to `label` float32 [rows].

    Inputs are like those of models with embeddings: numbers float32 [rows, columns], codes int64 [rows], lists of codes
    int64 [rows, length] of any length of at least 1. The trees read as many elements of a list as the schema has.

    Raises:
        UserError: the trees cannot be exported (`check_exportable`), or a feature has a name that the graph reserves.
    """
    check_exportable(booster)
    nodes = _Nodes()
    inputs = _matrix(nodes, schema)
    learner = json.loads(booster.save_raw("json"))["learner"]
    model = learner["gradient_booster"]["model"]
    nodes.add("TreeEnsemble", MATRIX, domain=_ML, out="tree.sum", **_ensemble(model["trees"]))
    sigmoid, margin = _margin(learner)
    total = nodes.add("Add", "tree.sum", nodes.constant(np.float32(margin)))
    total = nodes.add("Sigmoid", total) if sigmoid else total
    nodes.add("Squeeze", total, nodes.constant(np.array([1])), out=ONLY_TASK)
    return _model(nodes, inputs, [helper.make_tensor_value_info(ONLY_TASK, TensorProto.FLOAT, [ROWS])], "trees")


def matrix_graph(schema: DatasetSchema) -> Any:
    """Return a graph from features by name to `matrix` float32 [rows, columns], for another runtime of the trees."""
    nodes = _Nodes()
    inputs = _matrix(nodes, schema)
    width = len(matrix_columns(schema))
    return _model(nodes, inputs, [helper.make_tensor_value_info(MATRIX, TensorProto.FLOAT, [ROWS, width])], "matrix")


def _model(nodes: _Nodes, inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> Any:
    graph = helper.make_graph(nodes.nodes, name, inputs, outputs, nodes.initializers)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_ML, _ML_OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="headrace")


class _Nodes:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def add(self, op: str, *inputs: str, domain: str = "", out: str = "", **attributes: Any) -> str:
        name = out or f"tree.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Any) -> str:
        name = f"tree.constant.{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def _matrix(nodes: _Nodes, schema: DatasetSchema) -> list[Any]:
    """Add the nodes of `headrace.models.xgboost_model.matrix` and return the graph's inputs."""
    features = matrix_features(schema)
    if taken := [f.name for f in features if f.name.startswith("tree.") or f.name in _RESERVED]:
        raise UserError(f"the graph of the trees has these names for itself: {', '.join(taken)}; rename these features")
    inputs, columns = [], []
    for f in features:
        if f.kind is Kind.CONTINUOUS:
            inputs.append(helper.make_tensor_value_info(f.name, TensorProto.FLOAT, [ROWS, f.length]))
            columns.append(f.name)
            continue
        shape = [ROWS, f"{f.name}.length"] if f.is_list else [ROWS]
        inputs.append(helper.make_tensor_value_info(f.name, TensorProto.INT64, shape))
        columns.append(_codes(nodes, f))
    nodes.add("Concat", *columns, out=MATRIX, axis=1)
    return inputs


def _codes(nodes: _Nodes, f: Feature) -> str:
    """Add codes as float32 [rows, length], with NaN in place of 0."""
    first = nodes.constant(np.array([1]))
    if not f.is_list:
        codes = nodes.add("Unsqueeze", f.name, first)
    else:
        rows = nodes.add("Shape", f.name, start=0, end=1)
        shape = nodes.add("Concat", rows, nodes.constant(np.array([f.length])), axis=0)
        none = helper.make_tensor("value", TensorProto.INT64, [1], [NULL_CODE])
        longer = nodes.add("Concat", f.name, nodes.add("ConstantOfShape", shape, value=none), axis=1)
        codes = nodes.add("Slice", longer, nodes.constant(np.array([0])), nodes.constant(np.array([f.length])), first)
    missing = nodes.add("Equal", codes, nodes.constant(np.int64(NULL_CODE)))
    numbers = nodes.add("Cast", codes, to=TensorProto.FLOAT)
    return nodes.add("Where", missing, nodes.constant(np.float32(np.nan)), numbers)


def _link(objective: str) -> bool | None:
    """Return True if the sum is a logit (the base score a probability), False if it is the prediction, else None."""
    if objective in ("binary:logistic", "reg:logistic"):
        return True
    if objective.startswith("rank:") or objective in ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror"):
        return False
    return None


def _margin(learner: Mapping[str, Any]) -> tuple[bool, float]:
    """Return whether a sigmoid follows the trees' sum, and the constant that is added to it."""
    sigmoid = _link(learner["objective"]["name"])
    assert sigmoid is not None
    score = float(learner["learner_model_param"]["base_score"].strip("[]"))
    return sigmoid, math.log(score / (1 - score)) if sigmoid else score


def _ensemble(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes of TreeEnsemble. XGBoost sends members of a set to the right: their true branch."""
    out: dict[str, list[Any]] = {name: [] for name in _INTEGERS}
    splits: list[float] = []
    modes: list[int] = []
    leaves: list[float] = []
    members: list[float] = []
    for tree in trees:
        _add_tree(tree, out, splits, modes, leaves, members)
    attributes: dict[str, Any] = dict(out)
    attributes["leaf_targetids"] = [0] * len(leaves)
    attributes["nodes_splits"] = _floats("splits", splits)
    attributes["nodes_modes"] = helper.make_tensor("modes", TensorProto.UINT8, [len(modes)], modes)
    attributes["leaf_weights"] = _floats("weights", leaves)
    if members:
        attributes["membership_values"] = _floats("members", members)
    return attributes | {"n_targets": 1, "aggregate_function": 1, "post_transform": 0}


_INTEGERS = (
    "tree_roots",
    "nodes_featureids",
    "nodes_truenodeids",
    "nodes_trueleafs",
    "nodes_falsenodeids",
    "nodes_falseleafs",
    "nodes_missing_value_tracks_true",
)


def _floats(name: str, values: Sequence[float]) -> Any:
    return numpy_helper.from_array(np.asarray(values, np.float32), name)


def _add_tree(
    tree: Mapping[str, Any],
    out: Mapping[str, list[Any]],
    splits: list[float],
    modes: list[int],
    leaves: list[float],
    members: list[float],
) -> None:
    left, right = tree["left_children"], tree["right_children"]
    inner = [n for n in range(len(left)) if left[n] != -1]
    first = len(modes)
    node_ids = {n: first + i for i, n in enumerate(inner)}
    sets = _sets(tree)

    def child(n: int) -> tuple[int, int]:
        if n in node_ids:
            return node_ids[n], 0
        leaves.append(tree["split_conditions"][n])
        return len(leaves) - 1, 1

    out["tree_roots"].append(first)
    for n in inner or [-1]:
        is_set = n in sets
        ends = (n, n) if n < 0 else (right[n], left[n]) if is_set else (left[n], right[n])
        # A tree of one leaf becomes a node whose two branches lead to that leaf.
        branches = [child(0 if e < 0 else e) for e in ends]
        default_left = n < 0 or bool(tree["default_left"][n])
        out["nodes_featureids"].append(0 if n < 0 else tree["split_indices"][n])
        for branch, (node, leaf) in zip(("true", "false"), branches, strict=True):
            out[f"nodes_{branch}nodeids"].append(node)
            out[f"nodes_{branch}leafs"].append(leaf)
        out["nodes_missing_value_tracks_true"].append(int(default_left != is_set))
        modes.append(_MEMBER if is_set else _LESS)
        splits.append(0.0 if n < 0 or is_set else tree["split_conditions"][n])
        if is_set:
            members.extend([*map(float, sets[n]), math.nan])


def _sets(tree: Mapping[str, Any]) -> dict[int, NDArray[np.int64]]:
    """Return for each node that splits codes into two sets the codes that go right."""
    categories = np.asarray(tree.get("categories", []), np.int64)
    starts, sizes = tree.get("categories_segments", []), tree.get("categories_sizes", [])
    return {
        node: categories[start : start + size]
        for node, start, size in zip(tree.get("categories_nodes", []), starts, sizes, strict=True)
    }
