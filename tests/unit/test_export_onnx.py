"""Exported models in onnxruntime against the same models in torch: every class without lookups of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import config
from headrace.comm.base import Collective, LocalCollective
from headrace.comm.threads import run_ranks
from headrace.commands.export import export as export_command
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.storage.dtypes import DTYPES, decode, encode
from headrace.errors import UserError
from headrace.models.categorical import CategoricalBatch
from headrace.models.predictor import load_predictor
from headrace.models.saved import ModelCard, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.registry.versions import register, registered_name
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.storage import local
from headrace.workspace import Workspace

onnx_model = pytest.importorskip("headrace.export.onnx_model", reason="ONNX is not installed: run `make onnx`")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")

#: Before a test puts what it gave once in its place.
EXPORT_DENSE = onnx_model.export_dense
USERS, TAGS, ROWS = 1000, 50, 64
SCHEMA = DatasetSchema(
    features=(
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=USERS),
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=TAGS, length=5, is_list=True),
        Feature(name="prices", kind=Kind.CONTINUOUS, dtype="float32", length=3, is_list=True),
        Feature(name="seen", kind=Kind.CATEGORICAL, dtype="int32", cardinality=TAGS, vocabulary="tags"),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
TASKS = {"click": config.Task(), "buy": config.Task(label="buy"), "both": config.Task(product=("click", "buy"))}
MODELS: Mapping[str, dict[str, Any]] = {
    "dlrm": {"bottom_mlp": (8,), "top_mlp": (16,), "pooling": "mean"},
    "wide_deep": {"args": {"deep_mlp": [8]}, "pooling": "max"},
    "deepfm": {"args": {"deep_mlp": [8], "dropout": 0.2}},
    "dcn_v2": {"args": {"low_rank": 2, "experts": 2, "deep_mlp": [8]}},
    "final_mlp": {"args": {"first_mlp": [8, 4], "second_mlp": [6], "first_gate": ["user"]}},
    "masknet": {"args": {"blocks": [8, 8]}},
    "shared_bottom": {},
    "mmoe": {},
    # A sum of 3,000 vectors is another one in another order, which four experts and two levels make visible.
    "ple": {"pooling": "mean"},
    "esmm": {"pooling": "mean"},
    "tests.plugin_models:Settled": {"args": {"scale": 0.5}},
}
_OF_TASKS = ("shared_bottom", "mmoe", "ple", "esmm")


@cache
def model_of(name: str) -> ShardedModel:
    """Its tables are large enough in their numbers for rounding to be seen."""
    spec = config.Model.model_validate({"class": name, "embedding_dim": 8, **MODELS[name]})
    tasks = TASKS if name in _OF_TASKS else {}
    model = ShardedModel(SCHEMA, spec, LocalCollective(), 3, tasks=tasks).eval()
    with torch.no_grad():
        for rows in model.embeddings.weights:
            rows.mul_(20)
    return model


@cache
def dense_of(name: str) -> bytes:
    """The traced network, which the tables' precision does not change."""
    found: bytes = EXPORT_DENSE(model_of(name)).SerializeToString()
    return found


def card_of(model: ShardedModel) -> ModelCard:
    said = {"pipeline": "p", "ds": "2026-01-01", "key": "k", "metrics": {}, "seed": 3, "files": ()}
    return ModelCard(kind=model.config.kind, model=model.config, schema=SCHEMA, tasks=model.tasks.specs, **said)


def batch(rows: int = ROWS, seed: int = 1) -> dict[str, np.ndarray]:
    """Nulls and unknown values among codes, empty lists, one list of thousands of values with nulls between them."""
    rng = np.random.default_rng(seed)
    user, seen = rng.integers(0, USERS, rows), rng.integers(0, TAGS, rows)
    user[:4], seen[2:4] = [0, 1, USERS - 1, 0], 1
    tags = np.zeros((rows, 3000), np.int64)
    for row, length in enumerate(rng.integers(0, 6, rows)):
        tags[row, :length] = rng.integers(0, TAGS, length)
    tags[0], tags[1] = 0, rng.integers(0, TAGS, 3000)
    numbers = {name: rng.normal(size=(rows, n)).astype(np.float32) for name, n in (("age", 1), ("prices", 3))}
    return {"user": user, "tags": tags, "seen": seen, **numbers}


def in_torch(model: ShardedModel, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    continuous = torch.from_numpy(np.concatenate([given["age"], given["prices"]], axis=1))
    codes = torch.from_numpy(np.stack([given["user"], given["seen"]], axis=1))
    lists = [JaggedTensor.of_padded(torch.from_numpy(given["tags"]), 0)]
    with torch.inference_mode():
        outputs = model.outputs_of(continuous, CategoricalBatch(codes, lists))
        names = list(model.tasks.specs)
        if not names:
            return {"label": model.value(outputs["logits"]).numpy()}
        return {name: model.tasks.value(name, outputs[name]).numpy() for name in names}


def in_onnxruntime(folder: Path, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(given)), strict=True))


def export(name: str, folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Path:
    import onnx

    monkeypatch.setattr(onnx_model, "export_dense", lambda model: onnx.ModelProto.FromString(dense_of(name)))
    folder.mkdir()
    onnx_model.write_onnx(model_of(name), card_of(model_of(name)), local(folder), precision, **kwargs)
    return folder


def rounded(model: ShardedModel, precision: str) -> Callable[[], None]:
    """Give a model the numbers that the files have; what undoes it."""
    kept = [rows.clone() for rows in model.embeddings.weights]
    for rows in model.embeddings.weights:
        rows.copy_(decode(encode(rows, DTYPES[precision])))

    def undo() -> None:
        for rows, before in zip(model.embeddings.weights, kept, strict=True):
            rows.copy_(before)

    return undo


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_what_torch_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    model, given = model_of(name), batch()
    for precision in ("fp32", "fp16", "int8"):
        folder = export(name, tmp_path / precision, precision, monkeypatch)
        found = in_onnxruntime(folder, given)
        undo = rounded(model, precision)
        try:
            wanted = in_torch(model, given)
        finally:
            undo()
        assert list(found) == list(wanted)
        for task in wanted:
            np.testing.assert_allclose(found[task], wanted[task], rtol=1e-5, atol=1e-7, err_msg=f"{precision} {task}")
            assert np.std(wanted[task]) > 1e-3
    # One row, and as many as there are.
    for rows in (1, 3):
        part = {key: value[:rows] for key, value in given.items()}
        for task, value in in_torch(model, part).items():
            np.testing.assert_allclose(in_onnxruntime(tmp_path / "fp32", part)[task], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_rows_in_files_are_the_tables_within_their_rounding(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by NumPy, of several files a table: half a step of a row's grid, or the spacing of float16."""
    model = model_of("dlrm")
    whole = export("dlrm", tmp_path / "whole", precision, monkeypatch)
    parts = export("dlrm", tmp_path / "parts", precision, monkeypatch, file_bytes=5_000)
    assert len(list(whole.glob("*.bin"))) == 2
    assert len(list(parts.glob("*.bin"))) > 4
    assert all(p.stat().st_size <= 5_000 + 4096 for p in parts.glob("*.bin"))
    given = batch()
    for task, value in in_onnxruntime(whole, given).items():
        np.testing.assert_array_equal(in_onnxruntime(parts, given)[task], value)
    rows = onnx_model.write_tables.__globals__["stored_rows"](model)
    for number, name in enumerate(sorted(rows)):
        wanted = rows[name].numpy()
        raw = (whole / f"table-{number}-0.bin").read_bytes()
        if precision == "int8":
            codes = np.frombuffer(raw, np.uint8, wanted.size).reshape(wanted.shape)
            grid = np.frombuffer(raw, np.float32, offset=-(-wanted.size // 4096) * 4096).reshape(-1, 2)
            found = grid[:, 1:] + grid[:, :1] * codes
            bound = (wanted.max(1) - wanted.min(1)) / 255 / 2 * 1.001
            assert (np.abs(found - wanted).max(1) <= bound).all()
        else:
            found = np.frombuffer(raw, {"fp32": np.float32, "fp16": np.float16}[precision]).reshape(wanted.shape)
            bound = 0 if precision == "fp32" else np.spacing(np.abs(wanted).astype(np.float16)).astype(np.float32) / 2
            assert (np.abs(found.astype(np.float32) - wanted) <= bound).all()


def test_an_id_behind_the_last_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch() | {"user": np.full(ROWS, USERS)}
    for name, kwargs in (("whole", {}), ("parts", {"file_bytes": 5_000})):
        folder = export("dlrm", tmp_path / name, "fp32", monkeypatch, **kwargs)
        with pytest.raises(Exception, match="out of data bounds"):
            in_onnxruntime(folder, given)


def test_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((export("mmoe", tmp_path / "x", "fp16", monkeypatch) / "export.json").read_text())
    assert (record["class"], record["tables"], record["outputs"]) == ("mmoe", "fp16", list(TASKS))
    assert DatasetSchema.model_validate(record["schema"]) == SCHEMA


def test_what_cannot_be_exported_is_named_before_anything_is_written(tmp_path: Path) -> None:
    args = {"item": "seen", "user_features": ["user", "age"], "item_features": ["seen"], "user_mlp": [8]}
    spec = config.Model.model_validate({"class": "two_tower", "embedding_dim": 8, "args": args})
    raw = Feature(name="device", kind=Kind.CATEGORICAL, dtype="int64", cardinality=None, dynamic=True)
    schema = DatasetSchema(features=(*SCHEMA.features, raw))
    for made, said in (
        (ShardedModel(SCHEMA, spec, LocalCollective(), 3), "two_tower"),
        (ShardedModel(schema, model_of("dlrm").config, LocalCollective(), 3), "raw ids.*device"),
    ):
        with pytest.raises(UserError, match=said):
            onnx_model.write_onnx(made.eval(), card_of(made), local(tmp_path), "fp32")
    assert list(tmp_path.iterdir()) == []


def test_features_with_names_of_the_graph_are_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    graph = onnx.ModelProto.FromString(dense_of("dlrm")).graph
    inside = [graph.node[0].output[0], graph.initializer[0].name, "continuous", "vectors", "label", "lookup.0"]
    monkeypatch.setattr(onnx_model, "export_dense", lambda model: onnx.ModelProto.FromString(dense_of("dlrm")))
    for name in inside:
        schema = DatasetSchema(features=(*SCHEMA.features, Feature(name=name, kind=Kind.CONTINUOUS, dtype="float32")))
        made = ShardedModel(schema, model_of("dlrm").config, LocalCollective(), 3).eval()
        with pytest.raises(UserError, match=f"names for itself: {re.escape(name)};"):
            onnx_model.write_onnx(made, card_of(made), local(tmp_path), "fp32")
    assert list(tmp_path.iterdir()) == []


def test_a_registered_model_of_two_ranks_is_exported_whole(tmp_path: Path) -> None:
    """By the command: the saved rows of both ranks, asked as a saved model is; nothing is left beside the export."""
    workflow, saved, ws = tmp_path / "workflow", tmp_path / "home" / "model", Workspace(tmp_path / "home")
    workflow.mkdir()
    (workflow / "workflow.json").write_text("{}\n")
    spec = model_of("dlrm").config

    def save(collective: Collective) -> None:
        model = ShardedModel(SCHEMA, spec, collective, 5)
        save_model(
            local(saved), model, workflow=local(workflow), pipeline="clicks", ds="2026-01-01", key="k", metrics={}
        )

    run_ranks(2, save)
    name = registered_name("clicks", "train")
    register(ws, name, local(saved), {}, "k", ds="2026-01-01")
    to = tmp_path / "out" / "clicks"
    for _ in range(2):  # an export that is there is replaced
        export_command(ws, "clicks", "1", local(to), "fp32")
    assert [p.name for p in to.parent.iterdir()] == ["clicks"]
    given = batch() | {"tags": batch()["tags"][:, :5]}
    lists = {f"tags__{i}": given["tags"][:, i].astype(np.int32) for i in range(5)}
    prices = {f"prices__{i}": given["prices"][:, i] for i in range(3)}
    columns = {
        "user": given["user"].astype(np.int32),
        "seen": given["seen"].astype(np.int32),
        "age": given["age"][:, 0],
    }
    wanted = load_predictor(saved, 1).predict(columns | lists | prices)
    np.testing.assert_allclose(in_onnxruntime(to, given)["label"], wanted, rtol=1e-5, atol=1e-7)
    (to / "export.json").unlink()
    with pytest.raises(UserError, match="is no export"):
        export_command(ws, "clicks", "1", local(to), "fp32")
    with pytest.raises(UserError, match="no version 7"):
        export_command(ws, "clicks", "7", local(to), "fp32")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export_command(ws, "clicks", "1", local(tmp_path / "file" / "clicks"), "fp32")
