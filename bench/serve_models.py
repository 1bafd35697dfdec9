"""Models that the benches of `headrace serve` ask: a DLRM as `headrace export` writes it, one of exact answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace import config
from headrace.comm.base import LocalCollective
from headrace.export.onnx_model import write_onnx
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.storage import local

#: Criteo's columns: 13 numbers, 26 codes; tables of 50,000 rows of 16 numbers.
NUMBERS, CODES, CARDINALITY, DIM = 13, 26, 50_000, 16
#: Of the exact model.
TABLE_ROWS, STEP = 1_000_000, 1000


def write_dlrm(folder: Path) -> None:
    """Write a DLRM with layers of 64, 16 and 256, 128 as an export."""
    features = [Feature(name=f"i{n}", kind=Kind.CONTINUOUS, dtype="float32") for n in range(NUMBERS)]
    features += [
        Feature(name=f"c{n}", kind=Kind.CATEGORICAL, dtype="int32", cardinality=CARDINALITY) for n in range(CODES)
    ]
    schema = DatasetSchema(features=(*features, Feature(name="click", kind=Kind.LABEL, dtype="float32")))
    spec = config.Model.model_validate(
        {"class": "dlrm", "embedding_dim": DIM, "bottom_mlp": (64, 16), "top_mlp": (256, 128)}
    )
    model = ShardedModel(schema, spec, LocalCollective(), 1).eval()
    fields = {"pipeline": "bench", "ds": "2026-01-01", "key": "k", "metrics": {}, "seed": 1, "files": ()}
    card = ModelCard(kind="dlrm", model=spec, schema=schema, tasks={}, **fields)  # type: ignore[arg-type]
    with local(folder).new_folder() as new:
        write_onnx(model, card, new, "fp32")


def dlrm_inputs(rows: int, seed: int) -> dict[str, npt.NDArray[np.generic]]:
    """Draw inputs of the DLRM, codes by Zipf(1.05)."""
    rng = np.random.default_rng(seed)
    numbers = {f"i{n}": rng.normal(size=(rows, 1)).astype(np.float32) for n in range(NUMBERS)}
    return numbers | {f"c{n}": rng.zipf(1.05 + 1e-3, rows) % CARDINALITY for n in range(CODES)}


def write_exact(folder: Path, version: int, table: npt.NDArray[np.float32]) -> None:
    """Write a model with label[row] = sum of the 16 whole numbers of the row's user + version * STEP; the table is
    beside the graph.
    """
    nodes = [
        helper.make_node("Gather", ["table", "user"], ["rows"], axis=0),
        helper.make_node("ReduceSum", ["rows", "axis"], ["sum"], keepdims=0),
        helper.make_node("Add", ["sum", "version"], ["label"]),
    ]
    of_table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=table.shape)
    of_table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "table-0-0.bin"), ("offset", "0"), ("length", str(table.nbytes))):
        of_table.external_data.add(key=key, value=value)
    constants = {"axis": np.array([1]), "version": np.float32(version * STEP)}
    initializers = [of_table, *(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())]
    inputs = [helper.make_tensor_value_info("user", TensorProto.INT64, ["rows"])]
    outputs = [helper.make_tensor_value_info("label", TensorProto.FLOAT, ["rows"])]
    graph = helper.make_graph(nodes, "exact", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with local(folder).new_folder() as new:
        onnx.save(model, str(new / "model.onnx"))
        table.tofile(new / "table-0-0.bin")
