"""Exports made by hand, of models that NumPy computes: a fitted workflow, a logistic regression, vectors of items."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import xgboost as xgb
from onnx import TensorProto, helper, numpy_helper

from headrace.config import Chain
from headrace.config.schema import Feature, Kind, TableColumn
from headrace.export.features.columns import raw_columns, to_tensors
from headrace.export.record import ExportedGraph, ExportRecord, GraphTensor, file_sizes, write_record
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.models.xgboost_model import matrix, save
from headrace.storage import local

COLUMNS = [
    TableColumn(name="user", type="bigint", required=True),
    TableColumn(name="city", type="string"),
    TableColumn(name="age", type="double"),
    TableColumn(name="item", type="string"),
    TableColumn(name="tags", type="array<string>"),
    TableColumn(name="click", type="int"),
]
ITEMS = [f"item {i}" for i in range(30)]
CITIES = ["Bern", "Zürich", "Ōsaka"]
USERS = [str(i) for i in range(0, 40, 2)]


def vocabulary(values: list[str]) -> Lookup:
    return Lookup(pa.table({"value": values, "code": pa.array(range(2, 2 + len(values)), pa.int64())}))


@cache
def fitted(with_hash: bool = False) -> FittedWorkflow:
    """`with_hash`: one feature that ONNX has no operator for."""
    chains = [
        Chain(columns=("user", "city", "item"), ops=("categorify",)),
        Chain(columns=("age",), ops=({"fill_missing": {"indicator": True}}, "log", "normalize")),
        Chain(columns=("tags",), ops=({"categorify": {"vocabulary": "city"}}, {"pad": {"length": 3}})),
    ]
    if with_hash:
        chains.append(Chain(columns=("city",), ops=({"hash_bucket": {"buckets": 9}}, {"rename": {"to": "hashed"}})))
    w = Workflow(chains, COLUMNS, label="click")
    states = [[{"age": {"mean": 0.2, "std": 2.0}} for _ in c.steps] for c in w.chains]
    return FittedWorkflow(w, states, {"user": vocabulary(USERS), "city": vocabulary(CITIES), "item": vocabulary(ITEMS)})


def saved_model(folder: Path, with_hash: bool = False, seed: int = 3) -> Path:
    """A saved model's workflow, and an export of a logistic regression: a weight for each code and number."""
    saved, to, workflow = folder / f"model-{seed}", folder / f"export-{seed}", fitted(with_hash)
    workflow.save(local(saved / "workflow"))
    to.mkdir()
    nodes, constants, inputs, terms = [], [], [], []
    for i, (f, weights) in enumerate(weights_of(with_hash, seed)):
        numbers = f.kind is Kind.CONTINUOUS
        shape = ["rows", 1] if numbers else ["rows", f"{f.name}.length"] if f.is_list else ["rows"]
        type_ = TensorProto.FLOAT if numbers else TensorProto.INT64
        inputs.append(helper.make_tensor_value_info(f.name, type_, shape))
        constants.append(numpy_helper.from_array(weights, f"w{i}"))
        if numbers:
            nodes.append(helper.make_node("Mul", [f.name, f"w{i}"], [f"t{i}"]))
        else:
            nodes.append(helper.make_node("Gather", [f"w{i}", f.name], [f"g{i}"]))
            last = [f"g{i}", "axes"] if f.is_list else [f"g{i}", "last"]
            nodes.append(helper.make_node("ReduceSum" if f.is_list else "Unsqueeze", last, [f"t{i}"]))
        terms.append(f"t{i}")
    constants += [numpy_helper.from_array(np.array([1]), name) for name in ("axes", "last")]
    nodes += [
        helper.make_node("Sum", terms, ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["sigmoid"]),
        helper.make_node("Squeeze", ["sigmoid", "last"], ["label"]),
    ]
    output = helper.make_tensor_value_info("label", TensorProto.FLOAT, ["rows"])
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, [output], constants),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    onnx.save(model, to / "model.onnx", save_as_external_data=True, location="table-0-0.bin", size_threshold=64)
    record(to, "deepfm", {"model": graph_of(to, "model.onnx")}, workflow)
    return saved


def graph_of(folder: Path, file: str) -> ExportedGraph:
    model_graph = onnx.load(folder / file, load_external_data=False).graph
    tensors = [
        [
            GraphTensor(
                name=x.name,
                dtype="float32" if x.type.tensor_type.elem_type == TensorProto.FLOAT else "int64",
                shape=tuple(d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim),
            )
            for x in part
        ]
        for part in (model_graph.input, model_graph.output)
    ]
    return ExportedGraph(file=file, inputs=tensors[0], outputs=tensors[1], files=[p.name for p in folder.glob("*.bin")])


def record(folder: Path, kind: str, graphs: dict[str, ExportedGraph], workflow: FittedWorkflow, **more: Any) -> None:
    fields = {"format": "onnx", "class": kind, "pipeline": "p", "ds": "2026-01-01", "key": "k", "tables": "fp32"}
    files = file_sizes(local(folder))
    known = {**fields, "outputs": ["label"], "graphs": graphs, "files": files, "schema": workflow.schema, **more}
    write_record(local(folder), ExportRecord.model_validate(known))


def weights_of(with_hash: bool, seed: int) -> list[tuple[Feature, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(seed)
    return [(f, rng.normal(size=f.cardinality or 1).astype(np.float32)) for f in _ordered(fitted(with_hash))]


def _ordered(workflow: FittedWorkflow) -> list[Feature]:
    return [f for kind in (Kind.CONTINUOUS, Kind.CATEGORICAL) for f in workflow.features if f.kind is kind]


def rows(n: int = 40) -> pa.RecordBatch:
    rng = np.random.default_rng(5)
    lists = [[*rng.choice([*CITIES, "nowhere"], k)] if k else None for k in rng.integers(0, 5, n)]
    return pa.RecordBatch.from_pydict(
        {
            "user": pa.array(rng.integers(0, 45, n)),
            "city": pa.array([None if i % 7 == 0 else [*CITIES, "Rome"][i % 4] for i in range(n)]),
            "age": pa.array([None if i % 5 == 0 else float(i) for i in range(n)], pa.float64()),
            "item": pa.array([None if i % 11 == 0 else f"item {i % 34}" for i in range(n)]),
            "tags": pa.array([*lists], pa.list_(pa.string())),
        }
    )


def request(batch: pa.RecordBatch, columns: list[str] | None = None) -> dict[str, Any]:
    """Return a batch as a client sends it to Triton: scalars [rows, 1], texts as bytes."""
    workflow = fitted().workflow
    tensors = to_tensors(raw_columns(workflow, columns or fitted().input_columns), batch)
    out = {}
    for name, x in tensors.items():
        if x.dtype == object:
            x = np.array([v.encode() for v in x.ravel()], object).reshape(x.shape)
        out[name] = x[:, None] if x.ndim == 1 else x
    return out


def predicted(saved: Path, batch: pa.RecordBatch, with_hash: bool = False) -> np.ndarray[Any, Any]:
    """Predict by NumPy from the features that the Arrow engine makes of the rows."""
    transformed = fitted(with_hash).transform_batch(batch)
    total = np.zeros(batch.num_rows, np.float32)
    for f, weights in weights_of(with_hash, int(saved.name.removeprefix("model-"))):
        for name in f.physical:
            x = transformed.column(transformed.schema.get_field_index(name)).to_numpy()
            total += x * weights[0] if f.kind is Kind.CONTINUOUS else weights[x]
    return 1 / (1 + np.exp(-total))


def retrieval_model(folder: Path, items_from_codes: bool) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A saved model's workflow, and an export in retrieval form: an embedding of users and cities, one of items.

    Returns:
        the saved model, beside `export-retrieval`; by name, the embeddings float32 [codes, 4].
    """
    saved, to, workflow = folder / "model-retrieval", folder / "export-retrieval", fitted()
    workflow.save(local(saved / "workflow"))
    to.mkdir()
    rng = np.random.default_rng(8)
    sizes = {f.name: f.cardinality or 1 for f in workflow.features if f.name in ("user", "city", "item")}
    tables = {name: rng.normal(size=(n, 4)).astype(np.float32) for name, n in sizes.items()}
    for file, names, out in (("query.onnx", ("user", "city"), "query_vector"), ("item.onnx", ("item",), "item_vector")):
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["rows"]) for n in names]
        nodes = [helper.make_node("Gather", [f"w.{n}", n], [f"v.{n}"]) for n in names]
        nodes.append(helper.make_node("Sum", [f"v.{n}" for n in names], [out]))
        constants = [numpy_helper.from_array(tables[n], f"w.{n}") for n in names]
        output = helper.make_tensor_value_info(out, TensorProto.FLOAT, ["rows", 4])
        graph = helper.make_graph(nodes, "g", inputs, [output], constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), to / file)
    graphs = {name: graph_of(to, f"{name}.onnx") for name in ("query", "item")}
    items = None
    if items_from_codes:
        np.save(to / "items.npy", tables["item"])
        index_record = {"file": "items.npy", "feature": "item", "vocabulary": "item"}
        items = {**index_record, "rows": sizes["item"], "columns": 4, "first_code": 2}
    record(to, "two_tower", {"model": graphs["query"], **graphs}, workflow, items=items)
    return saved, tables


def saved_trees(folder: Path, seed: int) -> Path:
    """A saved model of boosted trees."""
    workflow = fitted()
    workflow.save(local(folder / "workflow"))
    transformed = workflow.transform_batch(rows(400))
    data = matrix(
        workflow.schema, {name: transformed.column(i).to_numpy() for i, name in enumerate(transformed.schema.names)}
    )
    label = (np.nan_to_num(data).sum(1) > 20 * seed).astype(int)
    booster = xgb.train({"objective": "binary:logistic", "nthread": 1}, xgb.DMatrix(data, label), 5)
    saved = folder / "saved"
    saved.mkdir()
    fields = {"pipeline": "p", "ds": "2026-01-01", "key": "k"}
    save(local(saved), booster, workflow.schema, local(folder / "workflow"), fields)
    return saved
