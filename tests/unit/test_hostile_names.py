"""Hostile names of columns without a JVM: what is exported, asked for by requests, and forgotten.

Whole days of them: tests/reported/test_17_names.py.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.cli.export import write_export
from headrace.comm.base import LocalCollective
from headrace.config import Chain, Model, build_spec
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.jobs.housekeeping.forget.erase import forget, found_places
from headrace.jobs.housekeeping.forget.persons import read_persons
from headrace.lake.delta.log import DeltaLog
from headrace.models.predictor import load_predictor
from headrace.models.registry.versions import Version
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, local
from tests.forget_support import put_rows, record

USER, ITEM, CITY = "Kunden-Nr.", 'the "best" `item` 100%', "größe;cm, it's"
SELECT, ORDER = "select", "Order by \\ %s {x} $y/#"
AGE, LONG = "price [EUR] <net>", "average basket value, " * 9 + "%s"
TYPES = {
    USER: "string",
    ITEM: "bigint",
    CITY: "string",
    SELECT: "boolean",
    AGE: "double",
    LONG: "float",
    ORDER: "array<string>",
}
USERS = [f"kunde-{n:04d}" for n in range(20)]
CITIES = ["Bern", "Zürich"]
PIPELINE = "hostile"


def codes(values: list[str]) -> Lookup:
    return Lookup(pa.table({"value": values, "code": pa.array(range(2, 2 + len(values)), pa.int64())}))


def fitted() -> FittedWorkflow:
    chains = [
        Chain(columns=(USER, ITEM, CITY, SELECT), ops=("categorify",)),
        Chain(columns=(AGE, LONG), ops=({"fill_missing": {"indicator": True}}, "log", "normalize")),
        Chain(columns=(ORDER,), ops=("categorify", {"pad": {"length": 3}})),
    ]
    columns = [TableColumn(name=n, type=t, required=n == USER) for n, t in TYPES.items()]
    w = Workflow(chains, [*columns, TableColumn(name="label", type="int")], label="label")
    states = [[{AGE: {"mean": 0.2, "std": 2.0}, LONG: {"mean": 0.5, "std": 1.5}} for _ in c.steps] for c in w.chains]
    items = codes([str(i) for i in range(9)])
    lookups = {USER: codes(USERS), ITEM: items, CITY: codes(CITIES), ORDER: codes(CITIES)}
    return FittedWorkflow(w, states, {**lookups, SELECT: codes(["false", "true"])})


def rows(n: int = 50) -> dict[str, list[Any]]:
    rng = np.random.default_rng(7)
    return {
        USER: [f"kunde-{i:04d}" for i in rng.integers(0, 24, n)],
        ITEM: [None if i == 9 else int(i) for i in rng.integers(0, 12, n)],
        CITY: [[*CITIES, "Rome", None][i] for i in rng.integers(0, 4, n)],
        SELECT: [[True, False, None][i] for i in rng.integers(0, 3, n)],
        AGE: [None if i % 6 == 0 else float(i) for i in range(n)],
        LONG: [None if i % 7 == 0 else i / 8 for i in range(n)],
        ORDER: [[[*CITIES, "Rome"][k] for k in rng.integers(0, 3, i % 4)] for i in range(n)],
    }


def tensors(columns: dict[str, list[Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """A request as docs/serving.md has it, column by column."""
    dtypes = {USER: object, ITEM: np.int64, CITY: object, SELECT: bool, AGE: np.float64, LONG: np.float32}
    fills: dict[str, Any] = {ITEM: 0, CITY: "", SELECT: False, AGE: np.nan, LONG: np.nan}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, dtype in dtypes.items():
        arrays[name] = np.array([fills[name] if v is None else v for v in columns[name]], dtype)
        if name in (ITEM, CITY, SELECT):
            arrays[f"{name}.missing"] = np.array([v is None for v in columns[name]])
    width = max(map(len, columns[ORDER]))
    arrays[ORDER] = np.array([[*values, *[""] * (width - len(values))] for values in columns[ORDER]], object)
    arrays[f"{ORDER}.length"] = np.array([len(values) for values in columns[ORDER]])
    arrays[f"{ORDER}.missing"] = np.zeros((len(columns[ORDER]), width), bool)
    return arrays


def save(ws: Workspace, workflow: FittedWorkflow) -> Location:
    """A saved model of no training."""
    workflow.save(ws.spark_local / "workflow")
    model = ShardedModel(workflow.schema, Model(embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,)), LocalCollective(), 5)
    saved, known = ws.model(PIPELINE, "2026-01-01", "k") / "model", {"pipeline": PIPELINE, "ds": "2026-01-01"}
    save_model(saved, model, workflow=ws.spark_local / "workflow", key="k", metrics={}, **known)
    shutil.rmtree((ws.spark_local / "workflow").local_path())
    return saved


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Location, np.ndarray[Any, Any]]:
    """A saved model, and what it says of the rows."""
    workflow = fitted()
    saved = save(Workspace(tmp_path_factory.mktemp("hostile")), workflow)
    transformed = workflow.transform_batch(pa.RecordBatch.from_pydict(rows(), schema=arrow_schema()))
    columns = {
        name: transformed.column(i).to_numpy(zero_copy_only=False) for i, name in enumerate(transformed.schema.names)
    }
    return saved, load_predictor(saved, 1).predict(columns)


def arrow_schema() -> pa.Schema:
    types = {"string": pa.string(), "bigint": pa.int64(), "boolean": pa.bool_(), "double": pa.float64()}
    types |= {"float": pa.float32(), "array<string>": pa.list_(pa.string())}
    return pa.schema([(name, types[t]) for name, t in TYPES.items()])


@pytest.fixture(scope="module")
def repository(trained: tuple[Location, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of `headrace serve`."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
    folder, version = tmp_path_factory.mktemp("serve"), Version(PIPELINE, "1", trained[0], "k", "2026-01-01", {})
    (folder / "scratch").mkdir()
    with local(folder / "models" / PIPELINE / "1").new_folder() as new:
        assert write_export(version, new, local(folder / "scratch"), "fp32") == ("dlrm", [])
    return folder / "models"


@pytest.mark.slow
def test_an_export(trained: tuple[Location, Any], repository: Path) -> None:
    """The graphs of features and model, one behind the other in onnxruntime."""
    import onnxruntime

    folder, cpu = repository / PIPELINE / "1", ["CPUExecutionProvider"]
    features = onnxruntime.InferenceSession(folder / "features.onnx", providers=cpu)
    inputs = tensors(rows())
    assert {x.name for x in features.get_inputs()} == inputs.keys()
    outputs = dict(zip([x.name for x in features.get_outputs()], features.run(None, inputs), strict=True))
    model = onnxruntime.InferenceSession(folder / "model.onnx", providers=cpu)
    (label,) = model.run(None, {x.name: outputs[f"{x.name}.feature"] for x in model.get_inputs()})
    np.testing.assert_allclose(label.ravel(), trained[1], rtol=1e-5)
    assert np.std(label) > 0


@pytest.mark.slow
def test_a_repository_of_triton(trained: tuple[Location, Any], repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
    pytest.importorskip("tritonclient", reason="tritonclient is not installed: run `make serve`")
    from headrace.export.triton.repository import write_repository
    from tests.triton_support import Repository

    saved, expected = trained
    exported = local(repository / PIPELINE / "1")
    write_repository(exported, saved, local(tmp_path / "triton"), name=PIPELINE, version=1)
    inputs = {
        name: np.array([v.encode() for v in x.ravel()], object).reshape(x.shape) if x.dtype == object else x
        for name, x in tensors(rows()).items()
    }
    batched = {name: x[:, None] if x.ndim == 1 else x for name, x in inputs.items()}
    (label,) = Repository(tmp_path / "triton").ask(PIPELINE, batched).values()
    np.testing.assert_allclose(label.ravel(), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["json", "grpc"])
def test_requests(trained: tuple[Location, Any], repository: Path, tmp_path: Path, protocol: str) -> None:
    """JSON over HTTP written by hand, gRPC by Triton's own client."""
    pytest.importorskip("grpc", reason="grpcio is not installed: run `make serve`")
    over_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: run `make serve`")
    from tests.serve_support import running

    arrays = tensors(rows())
    types = {"int64": "INT64", "float64": "FP64", "float32": "FP32", "object": "BYTES", "bool": "BOOL"}
    with running(repository, tmp_path / "log") as server:
        metadata = json.loads(server.get(f"/v2/models/{PIPELINE}")[1])
        assert {x["name"] for x in metadata["inputs"]} == arrays.keys()
        if protocol == "json":
            without_nan = {name: np.where(x == x, x, None) if x.dtype.kind == "f" else x for name, x in arrays.items()}
            inputs = [
                {"name": n, "shape": list(x.shape), "datatype": types[str(arrays[n].dtype)], "data": x.tolist()}
                for n, x in without_nan.items()
            ]
            complete = [
                i for i in range(len(rows()[AGE])) if rows()[AGE][i] is not None and rows()[LONG][i] is not None
            ]
            for x in inputs:
                x["data"] = [x["data"][i] for i in complete]
                x["shape"][0] = len(complete)
            status, answer = server.infer(PIPELINE, {"inputs": inputs})
            assert status == 200, answer
            label, expected = answer["outputs"][0]["data"], trained[1][complete]
        else:
            inputs = [over_grpc.InferInput(n, list(x.shape), types[str(x.dtype)]) for n, x in arrays.items()]
            for tensor, x in zip(inputs, arrays.values(), strict=True):
                tensor.set_data_from_numpy(x)
            with over_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
                label, expected = client.infer(PIPELINE, inputs).as_numpy("label").ravel(), trained[1]
    np.testing.assert_allclose(label, expected, rtol=1e-5)


def test_forgetting(tmp_path: Path) -> None:
    """Rows of these users leave tables and a saved model, by and beside such columns; others keep theirs."""
    ws, forgotten = Workspace(tmp_path / "home"), [USERS[0], USERS[7], USERS[19]]
    declared = [{"name": n, "type": TYPES[n]} for n in (USER, ITEM, CITY)]
    spec = build_spec(
        {
            "pipeline": PIPELINE,
            "source": {"format": "jsonl", "path": "landing/{ds}/*"},
            "table": {"columns": [*declared, {"name": "label", "type": "int"}]},
            "features": {
                "label": "label",
                "split": {"by": "position"},
                "workflow": [{"columns": [USER, ITEM], "ops": ["categorify"]}],
            },
        }
    )
    table = ws.table(PIPELINE, "events")
    for ds in ("2026-01-01", "2026-01-02"):
        held = pa.table(
            {
                USER: [USERS[i % 20] for i in range(40)],
                ITEM: pa.array(range(40), pa.int64()),
                CITY: [f"%{i}" for i in range(40)],
                "_source_file": ["f"] * 40,
            }
        )
        put_rows(table, ds, held, record(ds, 40))
    save(ws, fitted())
    (tmp_path / "who").write_text("\n".join(forgotten))
    persons = read_persons(spec, USER, tmp_path / "who")
    for _ in forget(spec, ws, persons, datetime.now(UTC)):
        pass
    log = DeltaLog(table)
    assert log.version is not None
    left = pa.concat_tables([pq.read_table(f.path, partitioning=None) for f in log.files(log.version) or []])
    expected = [(u, i, f"%{i}") for i in range(40) if (u := USERS[i % 20]) not in forgotten]
    assert sorted(zip(*(left.column(n).to_pylist() for n in (USER, ITEM, CITY)), strict=True)) == sorted(expected * 2)
    for path in (p for p in (tmp_path / "home").rglob("*") if p.is_file()):
        assert not [text for text in forgotten if text.encode() in path.read_bytes()], path


def test_what_the_user_is_to_delete(tmp_path: Path) -> None:
    """The user deletes rows of a table of theirs by a command that they can paste."""
    declared = [{"name": n, "type": TYPES[n]} for n in (USER, ITEM, CITY)]
    spec = build_spec(
        {
            "pipeline": PIPELINE,
            "source": {"format": "delta", "path": str(tmp_path / "table"), "day": {"partition": "ds"}},
            "table": {"columns": [*declared, {"name": "label", "type": "int"}]},
            "features": {"label": "label", "split": {"by": "position"}, "workflow": [{"columns": [USER], "ops": []}]},
        }
    )
    (tmp_path / "who").write_text("7")
    persons = read_persons(spec, ITEM, tmp_path / "who")
    (source,) = [p for p in found_places(spec, Workspace(tmp_path), persons, datetime.now(UTC)) if p.kind == "source"]
    assert 'WHERE `the "best" ``item`` 100%` IN (...)' in source.note
