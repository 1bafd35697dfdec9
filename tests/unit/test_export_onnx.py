"""Exported models in onnxruntime against the same models in torch: every class, format and precision."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import config
from headrace.cli.export import export_model as export_command
from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.compute.jagged import JaggedArray
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.mapped import load_mapped
from headrace.models.predictor import load_predictor
from headrace.models.registry.versions import register, registered_name
from headrace.models.saved import read_card, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, local

onnx = pytest.importorskip("onnx", reason="ONNX is not installed: run `make onnx`")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")

from bench.export_parity import (  # noqa: E402
    CASES,
    ITEMS,
    PLAIN,
    PRECISIONS,
    USERS,
    ExportCase,
    GraphAnswers,
    batch,
    batches,
    by_model,
    by_onnxruntime,
    by_torch_program,
    card_of,
    difference,
    make_model,
    rounded,
)
from headrace.export import files, onnx_model  # noqa: E402
from headrace.export.network import ITEM_VECTOR, ExportedNetwork  # noqa: E402
from headrace.export.record import ITEM, MODEL, read_record  # noqa: E402
from headrace.export.torch_model import write_torch  # noqa: E402

#: Before a test puts what it gave once in its place.
TRACED_ONNX = onnx_model.traced_onnx
#: See `difference`.
CLOSE = 1e-5
#: Classes of users: all features side by side; lookups of every form.
USER_CLASSES = {
    "tests.plugin_models:Settled": ExportCase("tests.plugin_models:Settled", settings={"args": {"scale": 0.5}}),
    "tests.plugin_models:Interests": ExportCase("tests.plugin_models:Interests"),
}
ALL: Mapping[str, ExportCase] = {**CASES, **USER_CLASSES}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def model_of(name: str) -> ShardedModel:
    return make_model(ALL[name])


@cache
def traced_of(name: str) -> bytes:
    """Return the traced network, which neither the tables' precision nor the number of ranks changes."""
    graph: bytes = TRACED_ONNX(ExportedNetwork(model_of(name))).SerializeToString()
    return graph


def export(
    name: str,
    folder: Path,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    model: ShardedModel | None = None,
    **more: Any,
) -> Location:
    monkeypatch.setattr(onnx_model, "traced_onnx", lambda exported: onnx.ModelProto.FromString(traced_of(name)))
    folder.mkdir()
    model = model_of(name) if model is None else model
    onnx_model.write_onnx(model, card_of(model), local(folder), precision, **more)
    return local(folder)


@pytest.mark.parametrize("name", ALL)
def test_onnxruntime_gives_what_torch_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nulls, unknown values and ids, empty lists, one of thousands; predictions and vectors of users and items."""
    model, case = model_of(name), ALL[name]
    for precision in PRECISIONS:
        folder = export(name, tmp_path / precision, precision, monkeypatch)
        for features in batches(case):
            with rounded(model, precision):
                expected = by_model(model, case, features)
            assert difference(by_onnxruntime(folder, features), expected) < CLOSE, (precision, len(features["user"]))
        assert np.std(next(iter(by_model(model, case, batch(case))[MODEL].values()))) > 1e-3
        record = read_record(folder)
        assert (record.items is not None) == (ITEM in record.graphs and name != "two_tower")
        if record.items is not None:
            codes = np.arange(2, ITEMS)
            of_codes = dict(batch(case, len(codes), longest=1)) | {"item": codes}
            exported = np.load(folder.local_path() / "items.npy")
            assert exported.shape == (record.items.rows, record.items.columns) == (ITEMS, exported.shape[1])
            vectors = by_onnxruntime(folder, of_codes)[ITEM][ITEM_VECTOR]
            np.testing.assert_allclose(exported[codes], vectors, rtol=CLOSE, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_two_ranks_saved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported from mapped files, it equals the export of one rank and the predictions of Spark's workers."""
    case, (workflow, saved) = CASES[name], (tmp_path / "workflow", tmp_path / "model")
    workflow.mkdir()
    (workflow / "workflow.json").write_text("{}\n")

    def save(collective: Collective) -> None:
        model = make_model(case, collective)
        save_model(local(saved), model, workflow=local(workflow), pipeline="p", ds="2026-01-01", key="k", metrics={})

    run_ranks(2, save)
    model, features = load_mapped(local(saved), local(tmp_path / "maps")), batch(case, longest=12)
    for precision in PRECISIONS:
        answers = by_onnxruntime(export(name, tmp_path / precision, precision, monkeypatch, model), features)
        alone = by_onnxruntime(export(name, tmp_path / f"{precision}-1", precision, monkeypatch), features)
        assert difference(answers, alone) == 0
        if precision == "fp32":
            expected = load_predictor(saved, 1).predict_tasks(columns_of(case.schema, features))
            assert difference({MODEL: answers[MODEL]}, {MODEL: expected}) < CLOSE


def columns_of(schema: DatasetSchema, features: Mapping[str, Any]) -> dict[str, Any]:
    """Return features by name, as Spark's workers have them."""
    columns: dict[str, Any] = {}
    for f in (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL)):
        values = features[f.name]
        if f.kind is Kind.CONTINUOUS:
            columns |= dict(zip(f.physical, values.T, strict=True))
        else:
            columns[f.name] = JaggedArray.of_padded(values) if f.is_list else values
    return columns


@pytest.mark.parametrize("name", ["mmoe", "two_tower, items by code", "sasrec", "din, raw ids", "lightgcn"])
def test_programs_of_torch_give_what_the_model_gives(name: str, tmp_path: Path) -> None:
    model, case, folder = model_of(name), CASES[name], local(tmp_path)
    write_torch(model, card_of(model), folder, "int8")
    for features in batches(case):
        with rounded(model, "int8"):
            expected = by_model(model, case, features)
        assert difference(by_torch_program(folder, features), expected) < CLOSE, len(features["user"])


#: As docs/export.md has it.
LOADER = re.search(r"```python\n(import json.*?)```", Path("docs/export.md").read_text(), re.S)


def test_a_program_of_torch_needs_nothing_of_headrace(tmp_path: Path) -> None:
    """The lines of the document, in a process that has no headrace."""
    model, case = model_of("dlrm, raw ids"), CASES["dlrm, raw ids"]
    write_torch(model, card_of(model), local(tmp_path), "int8", file_bytes=3_000)
    features = batch(case)
    np.savez(tmp_path / "given.npz", **features)
    assert LOADER is not None
    lines = LOADER[1].replace('"exports/clicks"', repr(str(tmp_path)))
    lines += "given = np.load(folder / 'given.npz')\nnp.save(folder / 'said.npy', predict('model', given)['label'])\n"
    lines += "import sys\nassert not any(name.split('.')[0] == 'headrace' for name in sys.modules)\n"
    subprocess.run([sys.executable, "-I", "-c", lines], check=True, cwd=tmp_path)
    with rounded(model, "int8"):
        expected = by_model(model, case, features)[MODEL]["label"]
    np.testing.assert_allclose(np.load(tmp_path / "said.npy"), expected, rtol=CLOSE, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_in_files_are_the_tables_within_their_rounding(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by NumPy, of several files a table: half a step of a row's grid, or the spacing of float16."""
    model, case = model_of("dlrm"), CASES["dlrm"]
    one_file = export("dlrm", tmp_path / "whole", precision, monkeypatch)
    parts = export("dlrm", tmp_path / "parts", precision, monkeypatch, file_bytes=1_500)
    bin_files = list(Path(parts.local_path()).glob("*.bin"))
    assert (len(list(Path(one_file.local_path()).glob("*.bin"))), len(bin_files) > 6) == (3, True)
    assert all(p.stat().st_size <= 1_500 + 4096 for p in bin_files)
    for features in batches(case):
        assert difference(by_onnxruntime(parts, features), by_onnxruntime(one_file, features)) == 0
    rows = files.stored_rows(ExportedNetwork(model))
    for number, name in enumerate(sorted(rows)):
        weights = rows[name].numpy()
        raw = (one_file / f"table-{number}-0.bin").read_bytes()
        if precision == "int8":
            codes = np.frombuffer(raw, np.uint8, weights.size).reshape(weights.shape)
            grid = np.frombuffer(raw, np.float32, offset=-(-weights.size // 4096) * 4096).reshape(-1, 2)
            bound = (weights.max(1) - weights.min(1)) / 255 / 2 * 1.001
            assert (np.abs(grid[:, 1:] + grid[:, :1] * codes - weights).max(1) <= bound).all()
        else:
            numbers = np.frombuffer(raw, {"fp32": np.float32, "fp16": np.float16}[precision]).reshape(weights.shape)
            bound = 0 if precision == "fp32" else np.spacing(np.abs(weights).astype(np.float16)).astype(np.float32) / 2
            assert (np.abs(numbers.astype(np.float32) - weights) <= bound).all()


def test_a_code_behind_the_last_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict(batch(CASES["dlrm"])) | {"user": np.full(64, USERS)}
    for name, kwargs in (("whole", {}), ("parts", {"file_bytes": 5_000})):
        folder = export("dlrm", tmp_path / name, "fp32", monkeypatch, **kwargs)
        with pytest.raises(Exception, match="out of data bounds"):
            by_onnxruntime(folder, features)


def test_a_table_of_raw_ids_without_rows(tmp_path: Path) -> None:
    """All ids, 0 too, have what stands for those without a row."""
    case = CASES["dlrm, raw ids"]
    spec = config.Model.model_validate({"class": case.kind, "embedding_dim": 8, **case.settings})
    model = ShardedModel(case.schema, spec, LocalCollective(), 3).eval()
    assert isinstance(model.absent, torch.nn.Parameter)
    with torch.no_grad():
        model.absent.copy_(torch.linspace(-1, 1, model.absent.numel()).view_as(model.absent))
    onnx_model.write_onnx(model, card_of(model), local(tmp_path), "fp32")
    for features in batches(case):
        assert difference(by_onnxruntime(local(tmp_path), features), by_model(model, case, features)) < CLOSE


def test_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export("mmoe", tmp_path / "mmoe", "fp16", monkeypatch)
    record = read_record(folder)
    assert (record.kind, record.tables, record.outputs) == ("mmoe", "fp16", ("click", "buy", "both"))
    assert record.dataset_schema == PLAIN
    assert [x.model_dump() for x in record.graphs[MODEL].inputs if x.name in ("age", "tags", "user")] == [
        {"name": "age", "dtype": "float32", "shape": ("rows", 1)},
        {"name": "user", "dtype": "int64", "shape": ("rows",)},
        {"name": "tags", "dtype": "int64", "shape": ("rows", "tags.length")},
    ]
    # A graph reads what it needs alone: a query no item, and an item no user.
    record = read_record(export("two_tower", tmp_path / "towers", "fp32", monkeypatch))
    inputs = {name: {x.name for x in graph.inputs} for name, graph in record.graphs.items()}
    assert inputs == {
        "model": {"user", "age", "prices", "item", "tags"},
        "query": {"user", "age", "prices"},
        "item": {"item", "tags"},
    }
    (folder / "table-0-0.bin").put_bytes(b"torn")
    with pytest.raises(UserError, match=r"table-0-0\.bin of an export is damaged: 4 bytes instead of"):
        read_record(folder)
    (folder / "table-0-0.bin").remove()
    with pytest.raises(UserError, match=r"table-0-0\.bin of an export is missing"):
        read_record(folder)


class Looping(torch.nn.Module):
    """Nothing that a graph could say."""

    def __init__(self, features: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, inputs: Any) -> dict[str, torch.Tensor]:
        if float(inputs.vectors.sum()) > 0:
            return {"logits": self.weight * inputs.vectors.sum((1, 2))}
        return {"logits": inputs.vectors.sum((1, 2))}


def test_a_class_that_cannot_be_exported_is_named_before_anything_is_written(tmp_path: Path) -> None:
    kind = f"{__name__}:Looping"
    model = make_model(ExportCase(kind))
    for write in (onnx_model.write_onnx, write_torch):
        with pytest.raises(UserError, match=f"class '{kind}' cannot be exported: .*data-dependent"):
            write(model, card_of(model), local(tmp_path), "fp32")
    assert list(tmp_path.iterdir()) == []


def test_features_with_names_of_the_graph_are_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = onnx.ModelProto.FromString(traced_of("dlrm")).graph
    inside = [graph.node[0].output[0], graph.initializer[0].name, "label", "lookup.0", "table-0-0", "keys-1"]
    monkeypatch.setattr(onnx_model, "traced_onnx", lambda exported: onnx.ModelProto.FromString(traced_of("dlrm")))
    for name in inside:
        schema = DatasetSchema(features=(*PLAIN.features, Feature(name=name, kind=Kind.CONTINUOUS, dtype="float32")))
        model = ShardedModel(schema, model_of("dlrm").config, LocalCollective(), 3).eval()
        with pytest.raises(UserError, match=f"names for itself: {re.escape(name)};"):
            onnx_model.write_onnx(model, card_of(model), local(tmp_path), "fp32")
    assert list(tmp_path.iterdir()) == []


def test_a_registered_model_is_exported_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The export equals the saved model and leaves nothing beside it.

    An existing target is an error that names the remedy.
    """
    workflow, saved, ws = tmp_path / "workflow", tmp_path / "home" / "model", Workspace(tmp_path / "home")
    workflow.mkdir()
    (workflow / "workflow.json").write_text("{}\n")
    model, case = model_of("dlrm"), CASES["dlrm"]
    save_model(local(saved), model, workflow=local(workflow), pipeline="clicks", ds="2026-01-01", key="k", metrics={})
    name = registered_name("clicks", "train")
    register(ws, name, local(saved), {}, "k", ds="2026-01-01")
    to, features = tmp_path / "out" / "clicks", batch(case, longest=12)
    expected = load_predictor(saved, 1).predict(columns_of(case.schema, features))
    answers: dict[str, GraphAnswers] = {}
    for form in ("torch", "onnx", "onnx"):  # an export that is there is replaced
        export_command(ws, "clicks", "1", local(to), "fp32", form=form)
        answers[form] = (by_torch_program if form == "torch" else by_onnxruntime)(local(to), features)
        np.testing.assert_allclose(answers[form][MODEL]["label"], expected, rtol=CLOSE, atol=1e-7)
    assert [p.name for p in to.parent.iterdir()] == ["clicks"]
    assert read_record(local(to)).key == read_card(local(saved)).key
    (to / "export.json").unlink()
    with pytest.raises(UserError, match="is no export"):
        export_command(ws, "clicks", "1", local(to), "fp32")
    with pytest.raises(UserError, match="no version 7"):
        export_command(ws, "clicks", "7", local(to), "fp32")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export_command(ws, "clicks", "1", local(tmp_path / "file" / "clicks"), "fp32")


#: 400 MB of rows in a file that is mapped, and room for 128 MB more in memory than an export of a small model takes.
IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from bench.export_parity import CASES, card_of, make_model
from headrace import config
from headrace.comm.base import LocalCollective
from headrace.embeddings.checkpoint.mapped import mapped_matrix
from headrace.export.onnx_model import write_onnx
from headrace.models.sharded_model import ShardedModel
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.storage import local
folder, precision = Path(sys.argv[1]), sys.argv[2]
small = make_model(CASES["matrix_factorization"])
(folder / "small").mkdir()
write_onnx(small, card_of(small), local(folder / "small"), precision)
def feature(name, rows):
    return Feature(name=name, kind=Kind.CATEGORICAL, dtype="int32", cardinality=rows)
label = Feature(name="click", kind=Kind.LABEL, dtype="float32")
schema = DatasetSchema(features=(feature("user", 1_500_000), feature("item", 60_000), label))
def matrix(fused):
    file = local(folder / f"{fused.number}.rows")
    mapped_matrix(file, fused.rows, fused.stored_width, fused.dtype, write=True)
    return mapped_matrix(file, fused.rows, fused.stored_width, fused.dtype)
settings = CASES["matrix_factorization"].settings
spec = config.Model.model_validate({"class": "matrix_factorization", "embedding_dim": 64, **settings})
model = ShardedModel(schema, spec, LocalCollective(), 3, matrix=matrix).eval()
assert sum(rows.numel() * 4 for rows in model.embeddings.weights) > 390e6
pages = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (pages + (128 << 20),) * 2)
(folder / "export").mkdir()
print(write_onnx(model, card_of(model), local(folder / "export"), precision))
"""


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_memory_does_not_grow_with_the_tables(precision: str, tmp_path: Path) -> None:
    """The kernel refuses the process what it would want for a third of the tables."""
    process = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, str(tmp_path), precision], check=True, capture_output=True, text=True
    )
    assert int(process.stdout) >= (390e6 if precision == "fp32" else 100e6)
