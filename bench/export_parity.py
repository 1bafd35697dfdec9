"""`python -m bench.export_parity`: exports beside the models that they are of, by class, format and precision.

Models of every class have numbers large enough for rounding to be seen. Each is exported in each format and precision,
and an export's answers are compared with torch's to the same rows: the largest difference is a cell of the table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from headrace import config
from headrace.comm.base import Collective, LocalCollective
from headrace.compute.jagged import FeatureColumns, matrix_of
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.storage import DTYPES, decode, encode
from headrace.export.files import Precision
from headrace.export.network import ITEM_VECTOR, QUERY_VECTOR, ExportedNetwork
from headrace.export.onnx_model import write_onnx
from headrace.export.record import ITEM, MODEL, QUERY, ExportRecord, read_record
from headrace.export.torch_model import write_torch
from headrace.models.categorical import CategoricalBatch
from headrace.models.predictor import ONLY_TASK
from headrace.models.retrieval import query_vectors, row_item_vectors
from headrace.models.saved import ModelCard
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, local

Batch = Mapping[str, NDArray[Any]]

USERS, ITEMS, TAGS, DEVICES, TIMES = 1000, 60, 50, 40, 24
#: Raw ids that have a row.
KNOWN_IDS = np.concatenate([np.arange(1, DEVICES) * 1_000_003, [-(2**63), 2**63 - 1, -7]]).astype(np.int64)


def _of_codes(name: str, cardinality: int, **more: Any) -> Feature:
    return Feature(name=name, kind=Kind.CATEGORICAL, dtype="int32", cardinality=cardinality, **more)


_USER = _of_codes("user", USERS, tags=("user",))
_AGE = Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32", tags=("user",))
_TAGS = _of_codes("tags", TAGS, length=5, is_list=True, tags=("item",))
_PRICES = Feature(name="prices", kind=Kind.CONTINUOUS, dtype="float32", length=3, is_list=True, tags=("user",))
_ITEM = _of_codes("item", ITEMS, tags=("item",))
_SEEN = _of_codes("seen", ITEMS, vocabulary="item")
_HISTORY = _of_codes("history", ITEMS, length=5, is_list=True, vocabulary="item")
_TIMES = Feature(name="times", kind=Kind.CONTINUOUS, dtype="float32", length=TIMES, is_list=True)
_DEVICE = Feature(name="device", kind=Kind.CATEGORICAL, dtype="int64", cardinality=None, dynamic=True)
_DEVICES = _DEVICE.model_copy(update={"name": "devices", "is_list": True, "length": 5})
_LABEL = Feature(name="click", kind=Kind.LABEL, dtype="float32")

TASKS = {"click": config.Task(), "buy": config.Task(label="buy"), "both": config.Task(product=("click", "buy"))}


def _schema(*features: Feature) -> DatasetSchema:
    return DatasetSchema(features=(*features, _LABEL))


PLAIN = _schema(_USER, _AGE, _TAGS, _PRICES, _ITEM)
HISTORIES = _schema(_USER, _AGE, _TAGS, _ITEM, _HISTORY)
CODES_ALONE = _schema(_USER, _ITEM, _HISTORY)


@dataclass(frozen=True)
class ExportCase:
    """A model to be exported.

    Attributes:
        kind: its class.
        schema: of its dataset.
        settings: of `model`, beside the class.
        tasks: of `train.tasks`.
        longest: values of the longest list of a batch.
    """

    kind: str
    schema: DatasetSchema = PLAIN
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: bool = False
    longest: int = 3000


def _args(**settings: Any) -> dict[str, Any]:
    return {"args": settings}


_PAIR = {"user": "user", "item": "item"}
CASES: Mapping[str, ExportCase] = {
    "dlrm": ExportCase("dlrm", settings={"bottom_mlp": (8,), "top_mlp": (16,), "pooling": "mean"}),
    "wide_deep": ExportCase("wide_deep", settings={**_args(deep_mlp=[8]), "pooling": "max"}),
    "deepfm": ExportCase("deepfm", settings=_args(deep_mlp=[8], dropout=0.2)),
    "dcn_v2": ExportCase("dcn_v2", settings=_args(low_rank=2, experts=2, deep_mlp=[8])),
    "final_mlp": ExportCase("final_mlp", settings=_args(first_mlp=[8, 4], second_mlp=[6], first_gate=["user"])),
    "masknet": ExportCase("masknet", settings=_args(blocks=[8, 8])),
    "shared_bottom": ExportCase("shared_bottom", tasks=True),
    "mmoe": ExportCase("mmoe", tasks=True),
    # A sum of 3,000 vectors is another one in another order, which four experts and two levels make visible.
    "ple": ExportCase("ple", settings={"pooling": "mean"}, tasks=True),
    "esmm": ExportCase("esmm", settings={"pooling": "mean"}, tasks=True),
    "matrix_factorization": ExportCase("matrix_factorization", CODES_ALONE, _args(**_PAIR)),
    "matrix_factorization, cosine": ExportCase(
        "matrix_factorization", CODES_ALONE, _args(**_PAIR, similarity="cosine", temperature=0.5)
    ),
    "neumf": ExportCase("neumf", CODES_ALONE, _args(**_PAIR, mlp=[8], mlp_dim=6)),
    "mult_vae": ExportCase("mult_vae", CODES_ALONE, _args(history="history", item="item", hidden=[12])),
    "lightgcn": ExportCase("lightgcn", CODES_ALONE, _args(**_PAIR, temperature=0.5)),
    "simplex": ExportCase("simplex", CODES_ALONE, _args(**_PAIR, history="history")),
    "two_tower": ExportCase("two_tower", PLAIN, _args(item="item", user_mlp=[8], item_mlp=[8], temperature=0.5)),
    "two_tower, items by code": ExportCase(
        "two_tower", PLAIN, _args(item="item", item_features=["item"], user_mlp=[8], item_mlp=[8])
    ),
    "sasrec": ExportCase("sasrec", HISTORIES, _args(item="item", history="history", length=10, heads=2)),
    "sasrec, newest first": ExportCase(
        "sasrec", HISTORIES, _args(item="item", history="history", length=10, newest="first", temperature=0.2)
    ),
    "hstu": ExportCase("hstu", HISTORIES, _args(item="item", history="history", length=10, heads=2)),
    "hstu, times": ExportCase(
        "hstu",
        _schema(_USER, _ITEM, _HISTORY, _TIMES),
        _args(item="item", history="history", length=10, times="times"),
        longest=TIMES,
    ),
    "din": ExportCase("din", HISTORIES, _args(histories={"item": "history"}, attention_mlp=[8], mlp=[8])),
    "din, softmax": ExportCase(
        "din", HISTORIES, _args(histories={"item": "history"}, softmax=True, activation="prelu", mlp=[8])
    ),
    "dlrm, raw ids": ExportCase(
        "dlrm", _schema(_USER, _AGE, _DEVICE, _DEVICES), {"bottom_mlp": (8,), "top_mlp": (16,), "pooling": "mean"}
    ),
    "din, raw ids": ExportCase(
        "din",
        _schema(_USER, _AGE, _ITEM, _DEVICES, _DEVICE, _HISTORY),
        _args(histories={"item": "history", "device": "devices"}, mlp=[8]),
    ),
}


def make_model(case: ExportCase, collective: Collective | None = None) -> ShardedModel:
    """Return the model of a case, in evaluation mode, the same on any number of ranks.

    Its tables' numbers are multiplied by 20; raw ids `KNOWN_IDS` have rows; LightGCN has a graph.
    """
    spec = config.Model.model_validate({"class": case.kind, "embedding_dim": 8, **case.settings})
    model = ShardedModel(case.schema, spec, collective or LocalCollective(), 3, tasks=TASKS if case.tasks else {})
    with torch.no_grad():
        for rows in model.embeddings.weights:
            rows.mul_(20)
        if hasattr(model.network, "observe"):
            model.observe(_edges())
        if model.dynamic is not None and model.absent is not None:
            _admit(model, case.schema)
            for absent in model.absent:
                absent.copy_(torch.linspace(-0.5, 0.5, absent.shape[-1]).expand_as(absent))
        _mend_statistics(model)
    return model.eval()


def _edges() -> list[Any]:
    rng = np.random.default_rng(5)
    codes = torch.from_numpy(np.stack([rng.integers(0, USERS, 400), rng.integers(0, ITEMS, 400)], 1))
    lists = [JaggedTensor.of_lengths(torch.zeros(0, dtype=torch.int64), torch.zeros(400, dtype=torch.int64))]
    return [(torch.zeros(400, 0), CategoricalBatch(codes, lists), torch.ones(400))]


def _mend_statistics(model: ShardedModel) -> None:
    """Set moving averages (Dice) that training would have moved."""
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.network.named_buffers():
        if name.endswith((".mean", ".variance")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.1)


def _admit(model: ShardedModel, schema: DatasetSchema) -> None:
    """Give the known ids rows, as a step of training does."""
    inputs = dict(batch(ExportCase("", schema), len(KNOWN_IDS), longest=3))
    for f in schema.of(Kind.CATEGORICAL):
        if f.dynamic:
            inputs[f.name] = KNOWN_IDS[:, None] if f.is_list else KNOWN_IDS
    with torch.enable_grad():
        model.train()(*tensors(schema, inputs))
    assert model.dynamic is not None
    for table in model.dynamic.tables:
        table.weight.mul_(20)


def batch(case: ExportCase, rows: int = 64, seed: int = 1, longest: int | None = None) -> Batch:
    """Draw nulls and unknown values among codes and ids, empty lists, one list of thousands of values with nulls
    between.
    """
    rng = np.random.default_rng(seed)
    longest = case.longest if longest is None else longest
    columns: dict[str, NDArray[Any]] = {}
    for f in (*case.schema.of(Kind.CONTINUOUS), *case.schema.of(Kind.CATEGORICAL)):
        if f.kind is Kind.CONTINUOUS:
            columns[f.name] = rng.normal(size=(rows, f.length)).astype(np.float32)
            if f.name == "times":
                columns[f.name] = np.sort(np.abs(columns[f.name]) * 1e4, axis=1)
        elif f.is_list:
            columns[f.name] = _lists(f, rng, rows, longest)
        else:
            columns[f.name] = _draw(f, rng, rows)
            columns[f.name][:3] = [0, 1, (f.cardinality or 8) - 1][:rows]
    return columns


def _draw(f: Feature, rng: np.random.Generator, size: Any) -> NDArray[np.int64]:
    if f.dynamic:
        return np.where(rng.random(size) < 0.2, rng.integers(-(2**62), 2**62, size), rng.choice(KNOWN_IDS, size))
    return rng.integers(0, f.cardinality or 0, size)


def _lists(f: Feature, rng: np.random.Generator, rows: int, longest: int) -> NDArray[np.int64]:
    lists = np.zeros((rows, max(1, longest)), np.int64)
    if longest:
        for row, length in enumerate(rng.integers(0, min(13, longest + 1), rows)):
            lists[row, :length] = _draw(f, rng, length)
        lists[0] = 0
        if rows > 1:
            lists[1] = _draw(f, rng, longest)
            lists[1, ::7] = 0
    return lists


def tensors(schema: DatasetSchema, inputs: Batch) -> tuple[torch.Tensor, CategoricalBatch]:
    """Return a batch as a model takes it."""
    rows = len(next(iter(inputs.values())))
    continuous = [torch.from_numpy(inputs[f.name]) for f in schema.of(Kind.CONTINUOUS)]
    scalars = [torch.from_numpy(inputs[f.name]) for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    lists = [
        JaggedTensor.of_padded(torch.from_numpy(inputs[f.name]), 0) for f in schema.of(Kind.CATEGORICAL) if f.is_list
    ]
    codes = torch.stack(scalars, 1) if scalars else torch.zeros(rows, 0, dtype=torch.int64)
    return torch.cat(continuous, 1) if continuous else torch.zeros(rows, 0), CategoricalBatch(codes, lists)


Answers = Mapping[str, NDArray[np.float32]]
#: By graph, what it gives.
GraphAnswers = Mapping[str, Answers]


def by_model(model: ShardedModel, case: ExportCase, inputs: Batch) -> GraphAnswers:
    """Return the model's own answers for a batch, by graph."""
    batch = tensors(case.schema, inputs)
    with torch.inference_mode():
        outputs = model.outputs_of(*batch)
        tasks = model.tasks
        by_task = {name: tasks.value(name, outputs[name]).numpy() for name in tasks.specs}
        answers = {MODEL: by_task or {ONLY_TASK: model.value(outputs["logits"]).numpy()}}
    if QUERY in ExportedNetwork(model).graphs:
        answers[QUERY] = {QUERY_VECTOR: query_vectors(model, *batch).numpy()}
        answers[ITEM] = {ITEM_VECTOR: row_item_vectors(model, *batch).numpy()}
    return answers


@contextmanager
def rounded(model: ShardedModel, precision: str) -> Iterator[None]:
    """Give a model the numbers that the files have, while the block runs.

    (LightGCN's are rounded behind the propagation.)
    """
    tables = list(model.embeddings.weights)
    tables += [] if model.dynamic is None else [t.weight for t in model.dynamic.tables]
    network = model.network
    propagated = getattr(network, "_propagated", None)
    if propagated is not None:
        rows = [x / network.args.temperature if not i else x for i, x in enumerate(propagated)]
        users, items = (x if precision == "fp32" else decode(encode(x, DTYPES[precision])) for x in rows)
        network._propagated = users * network.args.temperature, items
    saved = [rows.clone() for rows in tables]
    if propagated is None:
        for rows in tables:
            rows.copy_(decode(encode(rows, DTYPES[precision])))
    try:
        yield
    finally:
        for rows, original in zip(tables, saved, strict=True):
            rows.copy_(original)
        if propagated is not None:
            network._propagated = propagated


def inputs_of(schema: DatasetSchema, columns: FeatureColumns) -> Batch:
    """Return the inputs of an export, from features by name as predictors have them."""
    inputs: dict[str, NDArray[Any]] = {}
    for f in (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL)):
        values = matrix_of(columns, f)
        if f.kind is Kind.CONTINUOUS:
            inputs[f.name] = values.astype(np.float32)
        else:
            inputs[f.name] = (values if f.is_list else values.reshape(-1)).astype(np.int64)
    return inputs


def by_onnxruntime(folder: Location, inputs: Batch) -> GraphAnswers:
    """Return the answers of an ONNX export, on one thread."""
    record = read_record(folder)
    return {name: _session(folder, graph.file, inputs) for name, graph in record.graphs.items()}


def _session(folder: Location, file: str, inputs: Batch) -> Answers:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession((folder / file).local_path(), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_outputs()]
    feed = {x.name: inputs[x.name] for x in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


def by_torch_program(folder: Location, inputs: Batch) -> GraphAnswers:
    """Return the answers of a torch export."""
    record, answers = read_record(folder), {}
    for name, graph in record.graphs.items():
        program = torch.export.load((folder / graph.file).local_path()).module()
        arguments = [torch.from_numpy(inputs[x.name]) for x in graph.inputs]
        results = program(*arguments, *_mapped(folder, record, name))
        answers[name] = {o.name: x.detach().numpy() for o, x in zip(graph.outputs, results, strict=True)}
    return answers


def _mapped(folder: Location, record: ExportRecord, graph: str) -> list[Any]:
    tables = record.graphs[graph].tables
    return [
        torch.from_numpy(np.memmap((folder / t.file).local_path(), t.dtype, "c", t.offset, t.shape)) for t in tables
    ]


#: Differences of numbers below are relative to this: sums that cancel have fewer digits.
_SMALL = 0.1


def difference(answers: GraphAnswers, expected: GraphAnswers) -> float:
    """Return the largest difference, relative to what is expected, or to 0.1 where that is smaller."""
    assert {n: list(x) for n, x in answers.items()} == {n: list(x) for n, x in expected.items()}
    pairs = [(answers[g][n], x) for g, outputs in expected.items() for n, x in outputs.items()]
    return max(float(np.max(np.abs(a - b) / np.maximum(np.abs(b), _SMALL), initial=0)) for a, b in pairs)


PRECISIONS: Sequence[Precision] = ("fp32", "fp16", "int8")
WRITE: Mapping[str, Callable[[ShardedModel, ModelCard, Location, Precision], int]] = {
    "onnx": write_onnx,
    "torch": write_torch,
}
ASK: Mapping[str, Callable[[Location, Batch], GraphAnswers]] = {"onnx": by_onnxruntime, "torch": by_torch_program}


@dataclass(frozen=True)
class ParityRow:
    """Differences of a model's exports from torch with tables of rounded numbers, by format and precision."""

    name: str
    differences: Mapping[tuple[str, str], float]
    #: By precision: how far the rounding of the tables moves the model's own predictions.
    rounding: Mapping[str, float]


def card_of(model: ShardedModel) -> ModelCard:
    """Return a record of a model that was not trained."""
    fields = {"pipeline": "p", "ds": "2026-01-01", "key": "k", "metrics": {}, "seed": 3, "files": ()}
    return ModelCard(kind=model.config.kind, model=model.config, schema=model.schema, tasks=model.tasks.specs, **fields)


def batches(case: ExportCase) -> list[Batch]:
    """Return the batches to compare: many rows with a very long list, one row, lists that are all empty."""
    return [batch(case), batch(case, 1, seed=2, longest=5), batch(case, 3, seed=3, longest=0)]


def measure(name: str, formats: Sequence[str], scratch: Path) -> ParityRow:
    """Export a model in all ways, and ask it."""
    case = CASES[name]
    model, inputs = make_model(case), batches(case)
    scratch.mkdir(parents=True)
    differences, moved = {}, {}
    unrounded = [by_model(model, case, x) for x in inputs]
    for precision in PRECISIONS:
        with rounded(model, precision):
            expected = [by_model(model, case, x) for x in inputs]
        moved[precision] = max(difference(a, b) for a, b in zip(expected, unrounded, strict=True))
        for form in formats:
            folder = scratch / f"{form}-{precision}"
            folder.mkdir()
            WRITE[form](model, card_of(model), local(folder), precision)
            answers = [ASK[form](local(folder), x) for x in inputs]
            differences[form, precision] = max(difference(a, b) for a, b in zip(answers, expected, strict=True))
    return ParityRow(name, differences, moved)


def markdown(rows: Sequence[ParityRow], formats: Sequence[str], precisions: Sequence[str]) -> str:
    """Return the table, for a document."""
    columns = [(form, precision) for form in formats for precision in precisions]
    head = [
        "model",
        *(f"{form} {precision}" for form, precision in columns),
        *(f"rounding {p}" for p in precisions[1:]),
    ]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [f"{row.differences[c]:.1e}" for c in columns] + [f"{row.rounding[p]:.1e}" for p in precisions[1:]]
        lines.append([f"`{row.name}`", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.export_parity", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", nargs="*", default=list(CASES), help="Models, by the names of the table.")
    parser.add_argument("--formats", nargs="*", default=["onnx", "torch"], choices=["onnx", "torch"])
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="export-parity-") as scratch:
        for number, name in enumerate(args.only):
            rows.append(measure(name, args.formats, Path(scratch) / str(number)))
    print(markdown(rows, args.formats, PRECISIONS))


if __name__ == "__main__":
    main()
